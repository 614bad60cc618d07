"""`quire pull` as a process, broken off in every way that people and machines have."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.command import quire, start_quire
from tests.fakes.daemon import FakeDaemon, running_daemon
from tests.fakes.hub import FakeHub
from tests.fakes.tiny_model import write_tiny_model

NAME = "org/tiny"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    model = write_tiny_model(tmp_path_factory.mktemp("source"))
    return {file.name: file.read_bytes() for file in model.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add(NAME, files)
        yield hub


@pytest.fixture
def daemon(tmp_path: Path, hub: FakeHub) -> Iterator[FakeDaemon]:
    with running_daemon(tmp_path / "daemon", HF_ENDPOINT=hub.endpoint) as daemon:
        yield daemon


def stalled_pull(daemon: FakeDaemon, hub: FakeHub, *options: str) -> subprocess.Popen[str]:
    """A pull that hangs in the middle of its files."""
    hub.released.clear()
    hub.stalled.clear()
    hub.faults.stall_after_bytes = [1] * 100
    process = start_quire(daemon, "pull", NAME, *options)
    assert hub.stalled.wait(30)
    return process


def let_go(hub: FakeHub) -> None:
    hub.faults.stall_after_bytes = []
    hub.released.set()


def job(daemon: FakeDaemon) -> dict[str, Any]:
    (found,) = json.loads(quire(daemon, "jobs", "--json").stdout)["jobs"]
    return dict(found)


def end(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Exit code and stderr."""
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors.splitlines()


def test_ctrl_c_pauses_and_the_next_pull_goes_on(daemon: FakeDaemon, hub: FakeHub) -> None:
    process = stalled_pull(daemon, hub)
    process.send_signal(signal.SIGINT)
    code, lines = end(process)
    assert code == 130
    assert lines[-1].startswith("Paused")
    assert lines[-1].endswith(f"; `quire pull {NAME}` goes on from here.")
    assert job(daemon)["state"] == "paused"
    let_go(hub)
    done = quire(daemon, "pull", NAME)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].startswith(f"{NAME} is installed")
    assert job(daemon)["state"] == "done"


def test_a_killed_command_pauses_too(daemon: FakeDaemon, hub: FakeHub) -> None:
    process = stalled_pull(daemon, hub)
    process.kill()
    end(process)
    deadline_s = time.monotonic() + 10
    while job(daemon)["state"] != "paused":
        assert time.monotonic() < deadline_s, "the download goes on for nobody"
    let_go(hub)
    assert quire(daemon, "pull", NAME).returncode == 0


def test_a_killed_daemon_is_one_sentence_and_the_next_one_goes_on(
    daemon: FakeDaemon, hub: FakeHub, tmp_path: Path
) -> None:
    process = stalled_pull(daemon, hub)
    daemon.process.kill()
    code, lines = end(process)
    assert code == 1
    assert lines[-1] == (
        f"The daemon ended in the middle of the download; what has arrived is kept, and `quire pull {NAME}` "
        "goes on from there."
    )
    daemon.process.wait(15)
    assert job(daemon)["state"] == "paused"
    let_go(hub)
    with running_daemon(tmp_path / "daemon", HF_ENDPOINT=hub.endpoint) as again:
        assert quire(again, "pull", NAME).returncode == 0
        assert job(again)["state"] == "done"


def test_a_detached_download_outlives_its_followers_until_it_is_cancelled(daemon: FakeDaemon, hub: FakeHub) -> None:
    detaching = stalled_pull(daemon, hub, "--detach")
    code, lines = end(detaching)
    assert (code, lines[-1]) == (
        0,
        f"The daemon goes on with {NAME}; `quire jobs` shows how far it is, `quire pull {NAME}` follows it.",
    )
    following = start_quire(daemon, "pull", NAME, "--json")
    assert following.stdout is not None
    following.stdout.readline()
    following.send_signal(signal.SIGINT)
    code, lines = end(following)
    assert (code, lines[-1]) == (
        130,
        f"The download of {NAME} goes on in the daemon; `quire pull {NAME}` shows it, `quire pull --cancel {NAME}` "
        "stops it.",
    )
    assert job(daemon)["state"] == "running"
    cancelled = quire(daemon, "pull", "--cancel", "--discard", NAME)
    assert (cancelled.returncode, job(daemon)["state"]) == (0, "cancelled")
    assert cancelled.stderr.startswith(f"Cancelled {NAME}; ")
    assert not (daemon.data_root / "downloads" / "models--org--tiny").exists()


def test_a_run_shows_the_same_download(daemon: FakeDaemon) -> None:
    done = quire(daemon, "run", NAME, "hello")
    assert (done.returncode, "hello" in done.stdout) == (0, True), done.stderr
    assert f"{NAME} is not installed yet; pulling it." in done.stderr
    assert f"{NAME} is installed" in done.stderr
