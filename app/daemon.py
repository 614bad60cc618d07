"""Finds the running daemon, or starts one in the background.

A daemon says where it listens in `daemon.json`; whether it is alive is decided by asking
`/health`, never by the file or a process id.  Called by the commands of `app.cli`, which then
talk to the daemon through `app.client`.  Blocking; stdlib HTTP, so that finding out that no
daemon runs costs milliseconds.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from app.errors import StartupError
from app.instance import read_record
from app.settings import Settings, is_loopback
from store.locks import try_lock
from store.paths import DataRoot, user_paths

SERVE_COMMAND = (sys.executable, "-P", "-m", "app.cli", "serve")
START_TIMEOUT_S = 60.0
_PROBE_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 0.05
_LOG_TAIL_BYTES = 8192
_CONNECTABLE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class DaemonAddress(msgspec.Struct, frozen=True):
    """Where a daemon listens; `pid` and `version` are None for one that was only named by its address."""

    host: str
    port: int
    pid: int | None = None
    version: str | None = None

    @property
    def connect_host(self) -> str:
        """The host to connect to; a daemon that listens on every interface is reached by loopback."""
        return _CONNECTABLE.get(self.host, self.host)

    @property
    def base_url(self) -> str:
        host = f"[{self.connect_host}]" if ":" in self.connect_host else self.connect_host
        return f"http://{host}:{self.port}"


def running_daemon(settings: Settings) -> DaemonAddress | None:
    """The daemon that answers, or None.

    An address given by environment or command line (QUIRE_HOST, QUIRE_PORT) is the only one
    asked; else the one in `daemon.json`, which may be left over from a daemon that died.
    """
    address = _chosen_address(settings) or _recorded_address()
    return address if address is not None and _answers(address, settings.api_key) else None


def ensure_daemon(
    settings: Settings,
    notice: Callable[[str], None],
    *,
    command: Sequence[str] = SERVE_COMMAND,
    timeout_s: float = START_TIMEOUT_S,
) -> DaemonAddress:
    """The running daemon; starts one, after a `notice` that names its log, if there is none.

    Of several callers at once one starts it and the others wait.  Raises `StartupError` with
    the last line of the log as the reason, `DataRootUnusable`.
    """
    if address := running_daemon(settings):
        return address
    chosen = _chosen_address(settings)
    if chosen is not None and not is_loopback(chosen.connect_host):
        raise StartupError(
            f"No daemon answers at {chosen.base_url}; run `quire serve` on that machine, or unset QUIRE_HOST."
        )
    deadline_s = time.monotonic() + timeout_s
    with _start_lock(deadline_s):
        if address := running_daemon(settings):
            return address
        log = DataRoot.open(settings.data_root).logs / "daemon.log"
        notice(f"Starting the daemon in the background; its log is {log}")
        log_offset = log.stat().st_size if log.exists() else 0
        process = _spawn(command, log)
        return _wait_until_healthy(settings, process, log, log_offset, deadline_s)


def _chosen_address(settings: Settings) -> DaemonAddress | None:
    origins = (settings.origin("host"), settings.origin("port"))
    is_chosen = any(origin.startswith(("environment", "command line")) for origin in origins)
    return DaemonAddress(settings.host, settings.port) if is_chosen and settings.port else None


def _recorded_address() -> DaemonAddress | None:
    record = read_record(user_paths().state_dir)
    return DaemonAddress(record.host, record.port, record.pid, record.version) if record else None


def _answers(address: DaemonAddress, api_key: str | None) -> bool:
    """Whether /health at this address answers as a Quire daemon does."""
    connection = http.client.HTTPConnection(address.connect_host, address.port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/health", headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
        response = connection.getresponse()
        body = msgspec.json.decode(response.read(), type=dict[str, object])
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return False
    finally:
        connection.close()
    return response.status == 200 and body.get("status") == "ok"


@contextmanager
def _start_lock(deadline_s: float) -> Iterator[None]:
    """Hold the right to start a daemon; the kernel drops it if this process dies."""
    descriptor = os.open(user_paths().state_dir / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not try_lock(descriptor):
            if time.monotonic() > deadline_s:
                raise StartupError("Another command has been starting the daemon for too long; see `quire serve`.")
            time.sleep(_POLL_INTERVAL_S)
        yield
    finally:
        os.close(descriptor)


def _spawn(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start the daemon so that it outlives this process and the terminal."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=log.parent, start_new_session=True
        )


def _wait_until_healthy(
    settings: Settings, process: subprocess.Popen[bytes], log: Path, log_offset: int, deadline_s: float
) -> DaemonAddress:
    while True:
        has_ended = process.poll() is not None
        # Asked after the check, so that a daemon that someone else started at the same moment counts.
        if address := running_daemon(settings):
            return address
        if has_ended:
            reason = _last_line(log, log_offset) or f"it exited with status {process.returncode}"
            raise StartupError(f"The daemon could not start: {reason} (log: {log})")
        if time.monotonic() > deadline_s:
            process.terminate()
            reason = _last_line(log, log_offset) or "it said nothing"
            raise StartupError(f"The daemon did not answer in time; its last words: {reason} (log: {log})")
        time.sleep(_POLL_INTERVAL_S)


def _last_line(log: Path, offset: int) -> str:
    """The last line that was written to the log after `offset`."""
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(offset, end - _LOG_TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
