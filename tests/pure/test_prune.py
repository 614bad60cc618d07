"""What nobody needs any more: it is found, it goes, and nothing else does."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from store.errors import InvalidName, ModelBusy
from store.hf_cache import RepoCache
from store.locks import repo_lock_now
from store.models import ModelStore
from store.names import CommitId, Digest, RepoFile, RepoId
from store.paths import DataRoot
from store.presets.derive import copy_model
from store.upkeep.prune import Finding, find_waste, prune
from store.upkeep.prune_caches import packed_sources
from tests.fakes.command_here import quire
from tests.fakes.hub import COMMIT, sha256
from tests.fakes.installed import install

DAY_S = 86400
OLD_COMMIT = "f" * 40


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(DataRoot.open(tmp_path / "quire"))


def age(*paths: Path, days: float = 40) -> None:
    """Let files seem untouched for that long."""
    for path in paths:
        moment = time.time() - days * DAY_S
        os.utime(path, (moment, moment), follow_symlinks=False)


def found(store: ModelStore, *, days: float = 30, everything: bool = False) -> dict[str, tuple[str, str]]:
    findings = find_waste(store, older_than_days=days, everything=everything)
    return {finding.waste.name: (finding.waste.kind, finding.waste.reason) for finding in findings}


def prune_all(store: ModelStore, *, days: float = 30, everything: bool = False) -> int:
    return sum(prune(store, each) for each in find_waste(store, older_than_days=days, everything=everything))


def place(store: ModelStore, repo: str, file: str, content: bytes, commit: str = OLD_COMMIT) -> Path:
    """What a pull that was killed leaves in the cache: a complete file of a model that never was."""
    arrived = store.root.downloads / "file.partial"
    arrived.write_bytes(content)
    cache = RepoCache(store.root.hub, RepoId(repo))
    cache.add(arrived, CommitId(commit), RepoFile(file), Digest(sha256(content)))
    return cache.snapshot(CommitId(commit)) / file


def place_foreign(store: ModelStore, repo: str, file: str, content: bytes, commit: str) -> Path:
    """What huggingface_hub leaves in the cache."""
    directory = store.root.hub / RepoId(repo).folder
    blob = directory / "blobs" / sha256(content)
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    link = directory / "snapshots" / commit / file
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(blob, link.parent))
    age(link, blob)
    return link


def test_a_store_of_sound_models_has_no_waste(store: ModelStore) -> None:
    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    copy_model(store, "org/a", "mine")
    age(model.path, model.path.resolve())
    assert found(store, days=0, everything=True) == {}


def test_files_of_no_model_go_once_they_are_old(store: ModelStore) -> None:
    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF", "shared": b"both"}, entry="a.gguf")
    stray = place(store, "org/a", "b.gguf", b"stray")
    place(store, "org/a", "shared", b"both")
    assert found(store) == {}, "a paused download goes on with what it has"
    age(stray, stray.with_name("shared"))
    assert found(store) == {"org/a": ("files", "of no installed model")}
    assert prune_all(store) > 0
    assert store.list() == [model]
    assert not stray.parent.exists()
    assert (model.path.parent / "shared").read_bytes() == b"both"
    assert found(store, days=0) == {}


def test_what_other_tools_put_there_stays_unless_everything_is_asked_for(store: ModelStore) -> None:
    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    beside = place_foreign(store, "org/a", "theirs.bin", b"theirs", OLD_COMMIT)
    alone = place_foreign(store, "org/theirs", "theirs.bin", b"theirs", COMMIT)
    (store.root.hub / "datasets--org--x").mkdir()
    (store.root.hub / ".locks").mkdir()
    assert found(store, days=0) == {}
    everything = found(store, everything=True)
    assert everything == {
        "org/a": ("files", "of no installed model"),
        "org/theirs": ("other files", "in the cache, but of no model that Quire installed"),
    }
    assert prune_all(store, everything=True) > 0
    assert not beside.exists()
    assert not alone.parents[2].exists()
    assert store.list() == [model]
    assert (store.root.hub / "datasets--org--x").exists()


def test_blobs_without_a_link(store: ModelStore) -> None:
    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    blobs = model.path.resolve().parent
    (blobs / ("e" * 64)).write_bytes(b"nobody's")
    (blobs / ("d" * 64 + ".incomplete")).write_bytes(b"another tool is at work")
    age(*blobs.iterdir())
    assert found(store) == {"org/a": ("files", "in no snapshot")}
    prune_all(store)
    assert {path.suffix for path in blobs.iterdir()} == {"", ".incomplete"}
    assert store.list() == [model]


def test_unfinished_downloads(store: ModelStore) -> None:
    install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    folder = store.root.downloads / "models--org--a"
    folder.mkdir()
    names = [
        f"{sha256(b'GGUF')}.partial",
        f"{sha256(b'GGUF')}.partial.journal",
        "aa.partial",
        "bb.partial",
        "cc.broken",
    ]
    for name in names:
        (folder / name).write_bytes(b"x" * 5000)
    age(folder / "aa.partial")
    reasons = sorted(finding.waste.reason for finding in find_waste(store, older_than_days=30))
    assert reasons == ["complete by now", "set aside as broken", "unfinished for 30 days"]
    with repo_lock_now(store.root, RepoId("org/a")), pytest.raises(ModelBusy):
        prune_all(store)
    assert prune_all(store) >= 4 * 5000
    assert [path.name for path in folder.iterdir()] == ["bb.partial"]
    age(folder / "bb.partial")
    prune_all(store)
    assert not folder.exists()


def test_an_import_that_was_killed(store: ModelStore) -> None:
    folder = store.root.downloads / "import-models--org--a"
    folder.mkdir()
    (folder / "blob").write_bytes(b"x")
    assert found(store) == {"org/a": ("import", "never finished")}
    with repo_lock_now(store.root, RepoId("org/a")), pytest.raises(ModelBusy):
        prune_all(store)
    prune_all(store)
    assert not folder.exists()


def packed(path: Path, header: object) -> Path:
    content = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    return path


def test_packed_weights_go_with_their_model(store: ModelStore) -> None:
    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    folder = store.root.kernels / "cpu" / "packed"
    source = os.path.relpath(model.path.resolve(), folder)
    kept = packed(folder / "a.safetensors", {"__metadata__": {"sources": json.dumps([source])}, "x": {"dtype": "U8"}})
    packed(folder / "gone.safetensors", {"__metadata__": {"sources": json.dumps([source, "../../nowhere"])}})
    packed(folder / "older.safetensors", {"x": {}})
    (folder / "torn.safetensors").write_bytes(b"\xff" * 9)
    age(packed(folder / "killed.unfinished", {}))
    packed(folder / "at-work.unfinished", {})
    assert packed_sources(kept) == [model.path.resolve()]
    assert {name: reason for name, (_, reason) in found(store).items()} == {
        "gone.safetensors": "their model is gone",
        "older.safetensors": "of an older version",
        "torn.safetensors": "of an older version",
        "killed.unfinished": "never finished",
    }
    prune_all(store)
    assert sorted(path.name for path in folder.iterdir()) == ["a.safetensors", "at-work.unfinished"]


def test_kernels_that_nobody_uses(store: ModelStore) -> None:
    kernels = store.root.kernels
    for name in ("cpu/0123", "cpu/4567", "NVIDIA-triton-3-torch-2", "cuda"):
        (kernels / name).mkdir(parents=True)
        (kernels / name / "kernel").write_bytes(b"code")
        age(kernels / name / "kernel")
    os.utime(kernels / "cpu" / "4567" / "kernel")
    assert found(store) == {
        "NVIDIA-triton-3-torch-2": ("kernels", "not used for 30 days"),
        "cpu/0123": ("kernels", "not used for 30 days"),
        "cuda": ("kernels", "not used for 30 days"),
    }
    prune_all(store)
    assert [path.name for path in kernels.iterdir()] == ["cpu"]
    assert [path.name for path in (kernels / "cpu").iterdir()] == ["4567"]


def test_what_is_installed_meanwhile_stays(store: ModelStore) -> None:
    stray = place(store, "org/a", "a.gguf", b"GGUF", COMMIT)
    age(stray)
    findings: list[Finding] = find_waste(store, older_than_days=30)
    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    assert [prune(store, finding) for finding in findings] == [0]
    assert store.list() == [model]


def test_folders_name_their_repositories() -> None:
    for name in ("org/a", "ms:org/a", "pypi:some-package", "org/with-dash"):
        assert RepoId.of_folder(RepoId(name).folder) == name
    for folder in ("models--alone", "datasets--org--a", "models--..--a", "x", "models--a--b--c"):
        with pytest.raises(InvalidName):
            RepoId.of_folder(folder)


def test_the_command(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("QUIRE_CONFIG_DIR", "QUIRE_STATE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("QUIRE_HOME", str(store.root.root))
    assert quire("prune") == 0
    assert capsys.readouterr().err == "There is nothing to delete.\n"
    folder = store.root.downloads / "models--org--a"
    folder.mkdir()
    (folder / "aa.partial").write_bytes(bytes(8192))
    assert quire("prune", "--older-than", "0", "--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["download", "org/a", "8", "kB"]
    assert quire("prune", "--older-than", "0") == 1
    assert "give --yes" in capsys.readouterr().err
    assert folder.exists()
    assert quire("prune", "--older-than", "0", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"] == 8192
    assert not folder.exists()
