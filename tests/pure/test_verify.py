"""Hashing installed files again, and how a broken one is mended."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.errors import BrokenFile, InvalidName, ModelBusy, ModelNotFound
from store.hf_cache import RepoCache
from store.locks import repo_lock_now
from store.models import ModelStore
from store.names import CommitId, RepoFile, RepoId
from store.paths import DataRoot
from store.presets.derive import copy_model
from store.progress import PullProgress, Reporter
from store.upkeep.removal import remove
from store.upkeep.verify import BrokenPart, Verdict, Verifier, models_to_verify
from tests.fakes.hub import COMMIT, sha256
from tests.fakes.installed import install

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(DataRoot.open(tmp_path / "quire"))


def check(store: ModelStore, *names: str) -> list[Verdict]:
    verifier = Verifier(store, Reporter(lambda progress: None, lambda: False))
    return [verifier.verify(manifest) for manifest in models_to_verify(store, names)]


def test_sound_models_are_read_once_each(store: ModelStore) -> None:
    install(store, "org/b", "org/b", FILES)
    install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    install(store, "org/a:same", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    reports: list[PullProgress] = []
    verifier = Verifier(store, Reporter(reports.append, lambda: False))
    verdicts = [verifier.verify(manifest) for manifest in models_to_verify(store, ())]
    assert [(verdict.name, verdict.is_sound) for verdict in verdicts] == [
        ("org/a", True),
        ("org/a:same", True),
        ("org/b", True),
    ]
    assert [report.file for report in reports] == ["org/a a.gguf", "org/b config.json", "org/b model.safetensors"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (b"Weights", "its bytes are not those that were downloaded"),
        (b"wei", "it has 3 bytes instead of 7"),
        (None, "it is missing"),
    ],
)
def test_a_broken_file_is_set_aside_and_the_others_stay(store: ModelStore, damage: bytes | None, reason: str) -> None:
    model = install(store, "org/b", "org/b", FILES)
    blob = (model.path / "model.safetensors").resolve()
    if damage is None:
        blob.unlink()
    else:
        blob.write_bytes(damage)
    (verdict,) = check(store, "org/b")
    assert verdict.broken == (BrokenPart("model.safetensors", reason),)
    assert not blob.exists()
    cache = RepoCache(store.root.hub, RepoId("org/b"))
    held = [
        cache.holds(CommitId(COMMIT), RepoFile(file), sha256(content), len(content)) for file, content in FILES.items()
    ]
    assert held == [True, False], "a pull fetches the broken file alone"
    assert [part.reason for part in check(store, "org/b")[0].broken] == ["it is missing"]


def test_models_that_share_a_broken_file_are_both_broken(store: ModelStore) -> None:
    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    install(store, "org/a:same", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    model.path.resolve().write_bytes(b"FUGG")
    assert [verdict.is_sound for verdict in check(store)] == [False, False]


def test_what_to_pull_for_a_model_that_was_made_here(store: ModelStore) -> None:
    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    copy_model(store, "org/a", "mine")
    model.path.resolve().unlink()
    assert [verdict.mended_by for verdict in check(store)] == ["org/a", "org/a"]
    remove(store, "org/a")
    assert check(store)[0].mended_by == f"org/a@{COMMIT}:a.gguf"
    with pytest.raises(BrokenFile, match="quire verify mine"):
        store.find("mine")


def test_a_file_without_a_digest_is_left_alone(store: ModelStore) -> None:
    from store.models import Manifest, ManifestFile

    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    file = ManifestFile("a.gguf", "etag-" + "a" * 40, 4)
    store.register(Manifest("org/a", "org/a", "org/a", COMMIT, "hub", (file,), "a.gguf", 1.0))
    (verdict,) = check(store)
    assert (verdict.is_sound, verdict.unchecked) == (True, ("a.gguf",))
    assert model.path.exists()


def test_a_broken_file_of_a_model_that_is_being_pulled_stays(store: ModelStore) -> None:
    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    model.path.resolve().write_bytes(b"FUGG")
    with repo_lock_now(store.root, RepoId("org/a")), pytest.raises(ModelBusy):
        check(store)
    assert model.path.exists()


def test_only_installed_models_are_verified(store: ModelStore) -> None:
    assert check(store) == []
    with pytest.raises(ModelNotFound, match="quire list"):
        check(store, "org/absent")
    with pytest.raises(InvalidName, match="path"):
        check(store, "./model.gguf")
