from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.daemon import DaemonAddress, ensure_daemon, running_daemon
from app.errors import StartupError
from app.settings import Settings, load_settings

FAKE_DAEMON = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"status": "ok"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

state = Path(os.environ["QUIRE_STATE_DIR"])
with (state / "started").open("a") as file:
    file.write(f"{os.getpid()}\\n")
server = HTTPServer(("127.0.0.1", 0), Handler)
record = {"pid": os.getpid(), "host": "127.0.0.1", "port": server.server_port, "version": "1", "started_at": 0.0}
(state / "daemon.json").write_text(json.dumps(record))
server.serve_forever()
"""
SERVE = (sys.executable, "-c", FAKE_DAEMON)

# The daemon outlives its Popen object on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    for name in ("QUIRE_HOST", "QUIRE_PORT", "QUIRE_API_KEY", "QUIRE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("QUIRE_CONFIG_DIR", str(tmp_path / "config"))
    yield load_settings({"data_root": str(tmp_path / "data")})
    for pid in started_pids(tmp_path):
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue


def started_pids(tmp_path: Path) -> list[int]:
    record = tmp_path / "state" / "started"
    return [int(line) for line in record.read_text().split()] if record.exists() else []


def record_daemon(tmp_path: Path, port: int) -> None:
    (tmp_path / "state").mkdir(exist_ok=True)
    record = {"pid": 1, "host": "127.0.0.1", "port": port, "version": "1", "started_at": 0.0}
    (tmp_path / "state" / "daemon.json").write_text(json.dumps(record))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_starts_one_with_a_notice_and_finds_it_again(settings: Settings, tmp_path: Path) -> None:
    notices: list[str] = []
    assert running_daemon(settings) is None
    address = ensure_daemon(settings, notices.append, command=SERVE)
    assert [address.pid] == started_pids(tmp_path)
    assert len(notices) == 1
    assert str(tmp_path / "data" / "logs" / "daemon.log") in notices[0]
    assert ensure_daemon(settings, notices.append, command=SERVE) == address == running_daemon(settings)
    assert len(notices) == 1
    assert os.getsid(address.pid or 0) != os.getsid(0)


def test_two_at_once_start_one(settings: Settings, tmp_path: Path) -> None:
    addresses: list[DaemonAddress] = []
    threads = [
        threading.Thread(target=lambda: addresses.append(ensure_daemon(settings, lambda _: None, command=SERVE)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(started_pids(tmp_path)) == 1
    assert len(addresses) == 4
    assert len(set(addresses)) == 1


def test_a_record_left_by_a_dead_daemon_is_ignored(settings: Settings, tmp_path: Path) -> None:
    record_daemon(tmp_path, free_port())
    assert running_daemon(settings) is None
    assert ensure_daemon(settings, lambda _: None, command=SERVE).pid in started_pids(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"pid": 4}', '{"host": "127.0.0.1", "port": "x"}'])
def test_a_broken_record_is_ignored(settings: Settings, tmp_path: Path, content: str) -> None:
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "daemon.json").write_text(content)
    assert running_daemon(settings) is None


def test_another_program_on_the_recorded_port_is_no_daemon(settings: Settings, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        record_daemon(tmp_path, server.getsockname()[1])

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

        thread = threading.Thread(target=answer)
        thread.start()
        assert running_daemon(settings) is None
        thread.join()


def test_a_start_that_fails_says_why(settings: Settings) -> None:
    script = "import sys; print('working', flush=True); sys.exit('Port 11435 is in use; choose another with --port.')"
    with pytest.raises(StartupError, match=r"Port 11435 is in use; choose another with --port\..*daemon\.log"):
        ensure_daemon(settings, lambda _: None, command=(sys.executable, "-c", script))


def test_an_old_log_is_not_the_reason(settings: Settings, tmp_path: Path) -> None:
    logs = tmp_path / "data" / "logs"
    logs.mkdir(parents=True)
    (logs / "daemon.log").write_text("yesterday's trouble\n")
    with pytest.raises(StartupError, match="exited with status 3") as caught:
        ensure_daemon(settings, lambda _: None, command=(sys.executable, "-c", "raise SystemExit(3)"))
    assert "yesterday" not in caught.value.message


def test_a_start_that_hangs_is_given_up(settings: Settings) -> None:
    script = "import time; print('still thinking', flush=True); time.sleep(60)"
    start_s = time.monotonic()
    with pytest.raises(StartupError, match="still thinking"):
        ensure_daemon(settings, lambda _: None, command=(sys.executable, "-c", script), timeout_s=1.0)
    assert time.monotonic() - start_s < 30


def test_a_chosen_address_is_the_only_one_asked(settings: Settings, tmp_path: Path) -> None:
    address = ensure_daemon(settings, lambda _: None, command=SERVE)
    (tmp_path / "state" / "daemon.json").unlink()
    assert running_daemon(settings) is None
    chosen = load_settings(environ={"QUIRE_PORT": str(address.port)})
    found = running_daemon(chosen)
    assert found is not None
    assert found.base_url == address.base_url
    elsewhere = load_settings(environ={"QUIRE_PORT": str(free_port())})
    record_daemon(tmp_path, address.port)
    assert running_daemon(elsewhere) is None


def test_no_daemon_is_started_on_behalf_of_another_machine(settings: Settings, tmp_path: Path) -> None:
    environ = {"QUIRE_HOST": "192.0.2.1", "QUIRE_PORT": "1", "QUIRE_API_KEY": "k"}
    remote = load_settings(environ=environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.daemon._PROBE_TIMEOUT_S", 0.05)
        with pytest.raises(StartupError, match=r"No daemon answers at http://192\.0\.2\.1:1"):
            ensure_daemon(remote, lambda _: None, command=SERVE)
    assert started_pids(tmp_path) == []


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8"),
        ("0.0.0.0", "http://127.0.0.1:8"),
        ("::", "http://[::1]:8"),
        ("::1", "http://[::1]:8"),
        ("localhost", "http://localhost:8"),
    ],
)
def test_the_url_is_one_that_can_be_connected_to(host: str, url: str) -> None:
    assert DaemonAddress(host, 8).base_url == url
