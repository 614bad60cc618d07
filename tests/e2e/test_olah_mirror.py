"""Pulls through olah, a public mirror server that others wrote, in front of the stand-in hub.

olah wants other versions of shared libraries than ours, so it lives in an environment of its own:

    python -m venv /tmp/olah && /tmp/olah/bin/pip install olah
    QUIRE_TEST_OLAH=/tmp/olah/bin/olah-cli python -m pytest tests/e2e/test_olah_mirror.py
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from store.paths import DataRoot
from store.pull import HubSettings, RetryPolicy, pull
from tests.fakes.hub import COMMIT, FakeHub, sha256, unused_endpoint

OLAH = os.environ.get("QUIRE_TEST_OLAH") or shutil.which("olah-cli")
START_TIMEOUT_S = 60.0
WEIGHTS = random.Random(5).randbytes(20_000_000)
FILES = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}
POLICY = RetryPolicy(attempts=3, first_delay_s=0.0, max_delay_s=0.1)

pytestmark = pytest.mark.skipif(OLAH is None, reason="olah is not installed; the docstring of this file says how")


@pytest.fixture
def upstream() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("org/repo", dict(FILES))
        yield hub


@pytest.fixture
def mirror(upstream: FakeHub, tmp_path: Path) -> Iterator[str]:
    """The address of an olah that mirrors `upstream`."""
    endpoint = unused_endpoint()
    netloc = upstream.endpoint.removeprefix("http://")
    options = {
        "--host": "127.0.0.1",
        "--port": endpoint.rpartition(":")[2],
        "--hf-scheme": "http",
        "--hf-netloc": netloc,
        "--hf-lfs-netloc": netloc,
        "--repos-path": str(tmp_path / "olah/repos"),
        "--log-path": str(tmp_path / "olah/logs"),
    }
    assert OLAH is not None
    command = [OLAH, *(word for option in options.items() for word in option)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (tmp_path / "olah").mkdir()
    with (tmp_path / "olah/output").open("w") as output, subprocess.Popen(
        command, cwd=tmp_path / "olah", env=environment, stdout=output, stderr=output
    ) as process:  # fmt: skip
        try:
            _wait_until_it_answers(endpoint, process)
            yield endpoint
        finally:
            process.terminate()


def _wait_until_it_answers(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            httpx.get(endpoint, timeout=1.0, trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("olah did not start; its output is beside its repositories")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataRoot:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return DataRoot.open(tmp_path / "quire")


def pulled(root: DataRoot, *endpoints: str) -> dict[str, bytes]:
    settings = HubSettings(endpoints=endpoints)
    model = pull("org/repo", root, settings, lambda _: None, lambda: False, policy=POLICY)
    assert model.path.name == COMMIT
    assert (model.path / "model.safetensors").readlink().name == sha256(WEIGHTS)
    return {path.name: path.read_bytes() for path in model.path.iterdir()}


def test_a_pull_through_olah_is_verified_like_any_other(upstream: FakeHub, mirror: str, root: DataRoot) -> None:
    assert pulled(root, mirror) == FILES
    assert upstream.file_requests("model.safetensors") != []


def test_olah_takes_over_from_a_hub_that_fails_in_the_middle(mirror: str, root: DataRoot) -> None:
    with FakeHub() as hub:
        hub.add("org/repo", dict(FILES))
        hub.faults.drop_every_bytes = 1_000_000
        hub.faults.statuses = [None, None, None, None, *[500] * 50]
        assert pulled(root, hub.endpoint, mirror) == FILES


def test_olah_serves_when_the_hub_is_out_of_reach(mirror: str, root: DataRoot) -> None:
    assert pulled(root, unused_endpoint(), mirror) == FILES
