"""Newer commits of installed models: who has one, and getting there without fetching what did not change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.errors import DownloadFailed, HubUnreachable
from store.hub_settings import HubSettings
from store.models import InstalledModel, ModelStore
from store.names import CommitId
from store.paths import DataRoot
from store.plan import current_commit
from store.presets.derive import copy_model
from store.progress import Reporter
from store.pull import RetryPolicy, pull
from store.upkeep.removal import plan_removal, remove
from store.upkeep.update import Update, standings, update_model
from tests.fakes.command_here import quire
from tests.fakes.hub import COMMIT, FakeHub
from tests.fakes.installed import install

NEWER = "fedcba9876543210fedcba9876543210fedcba98"
OLD = {"config.json": b"{}", "model.safetensors": b"same", "tokenizer.json": b"old"}
NEW = {"config.json": b"{}", "model.safetensors": b"same", "tokenizer.json": b"newer"}


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(DataRoot.open(tmp_path / "quire"))


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("org/a", OLD)
        yield hub


def fetch(store: ModelStore, hub: FakeHub, name: str = "org/a", *, refresh: bool = False) -> InstalledModel:
    settings, policy = HubSettings((hub.endpoint,)), RetryPolicy(attempts=1)
    return pull(name, store.root, settings, lambda _: None, lambda: False, policy=policy, refresh=refresh)


def update(store: ModelStore, hub: FakeHub) -> Update:
    reporter = Reporter(lambda _: None, lambda: False)
    return update_model(store, "org/a", lambda name: fetch(store, hub, name, refresh=True), reporter)


def states(store: ModelStore, hub: FakeHub, *names: str) -> dict[str, str]:
    settings = HubSettings((hub.endpoint,))
    found = standings(store, names, lambda name: current_commit(name, settings, lambda: False))
    return {standing.name: standing.state for standing in found}


def test_only_what_changed_is_fetched_and_only_what_nobody_needs_goes(store: ModelStore, hub: FakeHub) -> None:
    fetch(store, hub)
    assert states(store, hub) == {"org/a": "current"}
    hub.add("org/a", NEW, commit=NEWER)
    assert states(store, hub) == {"org/a": "outdated"}
    hub.requests.clear()
    assert update(store, hub) == Update("org/a", COMMIT, NEWER, 3)
    assert [request.path.rsplit("/", 1)[1] for request in hub.file_requests()] == ["tokenizer.json"]
    model = store.find("org/a")
    assert {file.name: file.read_bytes() for file in model.path.iterdir()} == NEW
    assert [path.name for path in model.path.parent.iterdir()] == [NEWER]
    assert states(store, hub, "org/a") == {"org/a": "current"}


def test_a_copy_keeps_the_old_files(store: ModelStore, hub: FakeHub) -> None:
    fetch(store, hub)
    copy_model(store, "org/a", "before")
    hub.add("org/a", NEW, commit=NEWER)
    assert update(store, hub).freed_bytes == 0
    assert {file.name: file.read_bytes() for file in store.find("before").path.iterdir()} == OLD
    assert states(store, hub)["before"] == "made here"
    assert remove(store, "before").freed_bytes == 3


def test_a_failed_update_leaves_the_old_model(store: ModelStore, hub: FakeHub) -> None:
    before = fetch(store, hub)
    hub.add("org/a", NEW, commit=NEWER)
    hub.faults.statuses = [500] * 20
    with pytest.raises(DownloadFailed):
        update(store, hub)
    assert store.find("org/a") == before


def test_names_of_one_version_are_pinned(store: ModelStore, hub: FakeHub) -> None:
    install(store, f"org/a@{COMMIT}", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    install(store, "smollm2:135m", "org/b", {"b.gguf": b"GGUF"}, entry="b.gguf")
    assert states(store, hub, f"org/a@{COMMIT}") == {f"org/a@{COMMIT}": "pinned"}


def test_a_source_that_does_not_answer_is_told(store: ModelStore) -> None:
    install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")

    def nobody(name: str) -> CommitId:
        raise HubUnreachable(f"nobody has {name}; try later.")

    (standing,) = standings(store, (), nobody)
    assert (standing.state, standing.reason) == ("unknown", "nobody has org/a; try later.")


def test_what_an_unfinished_pull_has_put_into_the_cache_can_be_removed(store: ModelStore, hub: FakeHub) -> None:
    install(store, "org/a:theirs", "org/a", {"x.gguf": b"GGUF"}, entry="x.gguf")
    hub.faults.statuses = [None, None, 500, 500, 500, 500]
    with pytest.raises(DownloadFailed):
        fetch(store, hub)
    left = [path.name for path in (store.root.hub / "models--org--a" / "snapshots").rglob("*.*")]
    assert "config.json" in left
    removal = plan_removal(store, "org/a")
    assert (removal.is_unfinished, removal.freed_bytes > 0) == (True, True)
    assert remove(store, "org/a") == removal
    assert [model.name for model in store.list()] == ["org/a:theirs"]
    assert [path.name for path in (store.root.hub / "models--org--a" / "snapshots").rglob("*.*")] == ["x.gguf"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: FakeHub) -> None:
    for name in ("QUIRE_CONFIG_DIR", "QUIRE_STATE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "quire"))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.usefixtures("command")
def test_the_commands(
    store: ModelStore, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(store, hub)
    install(store, f"org/b@{COMMIT}", "org/b", {"a.gguf": b"GGUF"}, entry="a.gguf")
    assert quire("outdated") == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "Models that stay as they are: 1 current, 1 pinned to a version.\n")
    hub.add("org/a", NEW, commit=NEWER)
    assert quire("outdated") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["org/a", COMMIT[:12], NEWER[:12]]
    assert quire("update") == 2
    assert quire("update", f"org/b@{COMMIT}") == 0
    assert "stays as it is" in capsys.readouterr().err
    assert quire("update", "--all", "--json") == 0
    updated, pinned = json.loads(capsys.readouterr().out)["models"]
    assert (updated["state"], updated["freed_bytes"], pinned["state"]) == ("updated", 3, "pinned")
    assert quire("update", "org/a") == 0
    assert capsys.readouterr().err == "org/a is current.\n"
    hub.repos.clear()
    assert quire("outdated", "org/a") == 1
    assert capsys.readouterr().err.startswith("org/a: ")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert quire("update", "--all") == 1
    assert "environment HF_HUB_OFFLINE" in capsys.readouterr().err
