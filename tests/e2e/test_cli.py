"""The command `quire` as a process, against the real daemon on a real socket with a fake engine behind it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.command import quire, start_quire
from tests.fakes.daemon import FakeDaemon, running_daemon
from tests.fakes.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def daemon(home: Path) -> Iterator[FakeDaemon]:
    with running_daemon(home) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def model(home: Path) -> str:
    return str(write_tiny_model(home / "echo"))


@pytest.fixture(scope="module")
def slow_model(home: Path) -> str:
    return str(write_tiny_model(home / "slow", behaviour={"step_delay_s": 0.05}))


def test_run_streams_the_answer_to_stdout(daemon: FakeDaemon, model: str) -> None:
    done = quire(daemon, "run", model, "hello", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert "hello" in done.stdout
    assert done.stdout.endswith("\n")
    assert "Starting the daemon" not in done.stderr


def test_run_takes_the_prompt_from_a_pipe(daemon: FakeDaemon, model: str) -> None:
    done = quire(daemon, "run", model, "--json", stdin="from a pipe")
    assert done.returncode == 0, done.stderr
    assert "from a pipe" in json.loads(done.stdout)["text"]


def test_an_answer_that_the_daemon_refuses_is_one_sentence(daemon: FakeDaemon, model: str) -> None:
    done = quire(daemon, "run", model, "hello", "--temperature", "-1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "temperature" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_ps_and_stop(daemon: FakeDaemon, model: str) -> None:
    assert quire(daemon, "run", model, "hello").returncode == 0
    names = [entry["name"] for entry in json.loads(quire(daemon, "ps", "--json").stdout)["models"]]
    assert model in names
    stopped = quire(daemon, "stop", model)
    assert (stopped.returncode, stopped.stderr) == (0, f"Unloaded {model}.\n")
    names = [entry["name"] for entry in json.loads(quire(daemon, "ps", "--json").stdout)["models"]]
    assert model not in names


def test_ctrl_c_keeps_the_text_and_ends_the_request(daemon: FakeDaemon, slow_model: str) -> None:
    process = start_quire(daemon, "run", slow_model, "word " * 60)
    with process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (first + rest).endswith("\n")
    assert "Traceback" not in errors
    deadline_s = time.monotonic() + 10
    while any(entry["num_requests"] for entry in json.loads(quire(daemon, "ps", "--json").stdout)["models"]):
        assert time.monotonic() < deadline_s, "the request goes on without its client"


def test_shutdown_ends_the_daemon(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as own_daemon:
        done = quire(own_daemon, "shutdown")
        assert (done.returncode, done.stderr) == (0, "The daemon has stopped.\n")
        assert own_daemon.process.wait(15) == 0
        after = quire(own_daemon, "ps")
        assert (after.returncode, after.stdout) == (1, "")
        assert "No daemon is running" in after.stderr
