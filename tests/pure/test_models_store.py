"""The registry of installed models: listing, finding, removing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from store.errors import InvalidName, ModelBusy, ModelNotFound, UnsupportedFormat
from store.hf_cache import RepoCache
from store.locks import repo_lock_now
from store.models import ModelStore
from store.names import CommitId, RepoFile, RepoId
from store.paths import DataRoot
from store.upkeep.removal import remove
from tests.fakes.hub import COMMIT, sha256
from tests.fakes.installed import install


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(DataRoot.open(tmp_path / "quire"))


def test_a_registered_model_is_listed_and_found(store: ModelStore) -> None:
    model = install(store, "org/b", "org/b", {"config.json": b"{}", "model.safetensors": b"weights"})
    gguf = install(store, "Org/A:Q4_0", "Org/A", {"a.gguf": b"GGUF"}, entry="a.gguf")
    assert store.list() == [gguf, model]
    assert store.find("org/a:q4_0") == gguf
    assert gguf.digest == sha256(b"GGUF")
    assert gguf.path.read_bytes() == b"GGUF"
    assert model.path.is_dir()
    assert (model.size_bytes, model.source, len(model.digest)) == (9, "hub", 64)


def test_links_are_relative_so_that_the_root_can_move(store: ModelStore, tmp_path: Path) -> None:
    install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    store.root.root.rename(tmp_path / "moved")
    moved = ModelStore(DataRoot(tmp_path / "moved")).find("org/a")
    assert moved.path.read_bytes() == b"GGUF"
    assert moved.path.is_relative_to(tmp_path / "moved")


def test_the_hugging_face_library_reads_the_cache(store: ModelStore) -> None:
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    found = try_to_load_from_cache("org/a", "a.gguf", cache_dir=store.root.hub, revision=COMMIT)
    assert isinstance(found, str)
    assert Path(found).read_bytes() == b"GGUF"
    scan = scan_cache_dir(store.root.hub)
    assert scan.warnings == []
    assert [repo.repo_id for repo in scan.repos] == ["org/a"]


@pytest.mark.parametrize("damage", ["missing", "short", "manifest", "bytes", "hostile"])
def test_a_damaged_model_counts_as_not_installed(store: ModelStore, damage: str) -> None:
    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    manifest = next(store.root.hub.glob("*/quire/*.json"))
    if damage == "missing":
        model.path.resolve().unlink()
    elif damage == "short":
        model.path.resolve().write_bytes(b"GG")
    elif damage == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    elif damage == "bytes":
        manifest.write_bytes(manifest.read_bytes().replace(b"org/a", b"org/\xed"))
    else:
        manifest.write_text(manifest.read_text().replace('"a.gguf"', '"../../../../../../etc/passwd"'))
    assert store.list() == []
    with pytest.raises(ModelNotFound):
        store.find("org/a")


def test_an_alias_and_its_repository_are_one_model(store: ModelStore) -> None:
    model = install(store, "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", {"config.json": b"{}"})
    assert store.find("qwen3:0.6b") == model


def test_messages_name_the_next_step(store: ModelStore) -> None:
    with pytest.raises(ModelNotFound, match=r"get it with `quire pull smollm2:135m`"):
        store.find("starter")
    with pytest.raises(ModelNotFound, match=r"did you mean qwen3:0\.6b"):
        store.find("qwen3:0.5b")
    with pytest.raises(ModelNotFound, match=r"quire pull organisation/name"):
        store.find("zzzzzzzz")
    with pytest.raises(ModelNotFound, match="check the path"):
        store.find("./nowhere")
    with pytest.raises(ModelNotFound, match="`quire list`"):
        remove(store, "starter")


def test_a_store_that_speaks_for_other_machines_finds_no_files(store: ModelStore, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    assert store.find(str(model)).path == model
    remote = ModelStore(store.root, serves_paths=False)
    with pytest.raises(ModelNotFound) as existing:
        remote.find(str(model))
    with pytest.raises(ModelNotFound) as missing:
        remote.find(str(tmp_path / "other.gguf"))
    assert str(existing.value) == str(missing.value)


def test_local_paths_are_found_and_not_registered(store: ModelStore, tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    directory.mkdir()
    with pytest.raises(UnsupportedFormat, match=r"config\.json"):
        store.find(str(directory))
    (directory / "config.json").write_text("{}")
    (directory / "weights.gguf").write_bytes(b"GGUF")
    assert store.find(str(directory)).size_bytes == 6
    gguf = store.find(str(directory / "weights.gguf"))
    assert (gguf.source, gguf.size_bytes, gguf.path) == ("path", 4, directory / "weights.gguf")
    assert store.list() == []
    with pytest.raises(InvalidName):
        remove(store, str(directory))
    assert (directory / "config.json").exists()


def test_removing_frees_the_bytes_and_the_repository(store: ModelStore) -> None:
    install(store, "org/a", "org/a", {"config.json": b"{}", "sub/weights.safetensors": b"weights"})
    assert remove(store, "org/a").freed_bytes == 9
    assert store.list() == []
    assert list(store.root.hub.iterdir()) == []


def test_removing_keeps_what_others_need(store: ModelStore) -> None:
    other_commit = "f" * 40
    install(store, "org/a:Q4_0", "org/a", {"a.gguf": b"four", "config.json": b"{}"}, entry="a.gguf")
    eight = install(store, "org/a:Q8_0", "org/a", {"b.gguf": b"eight", "config.json": b"{}"}, entry="b.gguf")
    install(store, "org/a@old", "org/a", {"a.gguf": b"four"}, entry="a.gguf", commit=other_commit)
    assert remove(store, "org/a:Q4_0").freed_bytes == 0, "the other revision still links to the blob"
    assert store.find("org/a:Q8_0") == eight
    assert remove(store, "org/a@old").freed_bytes == 4
    assert remove(store, "org/a:Q8_0").freed_bytes == 7


def test_a_model_that_is_being_pulled_is_not_removed(store: ModelStore) -> None:
    install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    with repo_lock_now(store.root, RepoId("org/a")), pytest.raises(ModelBusy):
        remove(store, "org/a")
    assert remove(store, "org/a").freed_bytes == 4


def test_without_symbolic_links_the_file_itself_is_in_the_snapshot(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("store.hf_cache.Path.symlink_to", refuse)
    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    assert not model.path.is_symlink()
    cache = RepoCache(store.root.hub, RepoId("org/a"))
    assert cache.holds(CommitId(COMMIT), RepoFile("a.gguf"), sha256(b"GGUF"), 4)
    assert store.find("org/a") == model
    assert remove(store, "org/a").freed_bytes == 4


def test_listing_many_models_imports_nothing_slow(store: ModelStore) -> None:
    for number in range(200):
        install(store, f"org/m{number}", f"org/m{number}", {"a.gguf": b"GGUF"}, entry="a.gguf")
    code = (
        "import sys, app.translate.admin; from store.models import ModelStore; from store.paths import DataRoot; "
        "assert len(ModelStore(DataRoot.open()).list()) == 200; "
        "print(*{'httpx', 'huggingface_hub', 'sqlite_utils', 'torch', 'numpy', 'tokenizers', 'zmq'} & set(sys.modules))"
    )
    environment = os.environ | {"QUIRE_HOME": str(store.root.root)}
    listed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert listed.stdout.strip() == ""
