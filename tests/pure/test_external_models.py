"""Registered folders: whose models appear, under which names, and that nothing is ever written there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import DataRootUnusable, ModelNotFound, ModelNotOwned, UnsupportedFormat
from store.external import _alias, scan_folder
from store.external_folders import add_folder, registered_folders, remove_folder
from store.models import ModelStore
from store.names import parse_model_name
from store.paths import DataRoot
from store.upkeep.removal import remove
from tests.fakes.hub import COMMIT, sha256

OTHER_COMMIT = "f" * 40


@pytest.fixture
def root(tmp_path: Path) -> DataRoot:
    return DataRoot.open(tmp_path / "quire")


def cached(hub: Path, repo: str, files: dict[str, bytes], *, commit: str = COMMIT, ref: str | None = None) -> Path:
    """A repository as huggingface_hub keeps it."""
    directory = hub / f"models--{repo.replace('/', '--')}"
    (directory / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot = directory / "snapshots" / commit
    for name, content in files.items():
        blob = directory / "blobs" / sha256(content)
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (2 + name.count("/")), "blobs", blob.name))
    if ref:
        (directory / "refs").mkdir(exist_ok=True)
        (directory / "refs/main").write_text(ref)
    return snapshot


def write(path: Path, content: bytes = b"weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in [folder, *folder.rglob("*")]}


def names(store: ModelStore) -> list[str]:
    return [model.name for model in store.list()]


@pytest.mark.parametrize("below", ["hub", "."])
def test_models_of_a_hugging_face_cache_keep_their_names(root: DataRoot, tmp_path: Path, below: str) -> None:
    theirs = tmp_path / "theirs"
    snapshot = cached(theirs / below, "Org/Dense", {"config.json": b"{}", "model.safetensors": b"weights"})
    cached(theirs / below, "Org/Quants-GGUF", {"quants.Q4_K_M.gguf": b"four", "quants.Q8_0.gguf": b"eight"})
    before = tree(theirs)

    add_folder(root, theirs)
    store = ModelStore(root)

    assert names(store) == ["Org/Dense", "Org/Quants-GGUF:quants.Q4_K_M.gguf", "Org/Quants-GGUF:quants.Q8_0.gguf"]
    dense = store.find("org/dense")
    assert (dense.path, dense.source, dense.size_bytes) == (snapshot, "external", 9)
    for name in ("org/quants-gguf:quants.Q4_K_M.gguf", "Org/Quants-GGUF:Q4_K_M", f"Org/Quants-GGUF@{COMMIT}:q4_k_m"):
        assert store.find(name).path.read_bytes() == b"four"
    assert store.find("Org/Quants-GGUF:Q8_0").digest == sha256(b"eight")
    for absent in ("Org/Quants-GGUF:Q5_0", f"Org/Dense@{OTHER_COMMIT}", "Org/Quants-GGUF"):
        with pytest.raises(ModelNotFound):
            store.find(absent)
    assert tree(theirs) == before


def test_an_alias_finds_its_repository_in_a_registered_cache(root: DataRoot, tmp_path: Path) -> None:
    from store.catalog import catalog_models

    starter = catalog_models()["starter"]
    assert starter.file is not None
    assert starter.hub.revision is not None
    cached(tmp_path / "theirs", starter.hub.repo, {starter.file.name: b"GGUF"}, commit=starter.hub.revision)
    add_folder(root, tmp_path / "theirs")
    assert ModelStore(root).find("starter").path.read_bytes() == b"GGUF"
    assert ModelStore(root).find_pulled(parse_model_name("starter")) is None


def test_the_snapshot_of_main_counts_and_an_incomplete_one_does_not(root: DataRoot, tmp_path: Path) -> None:
    hub = tmp_path / "theirs"
    cached(hub, "org/a", {"a.gguf": b"old"}, commit=OTHER_COMMIT)
    cached(hub, "org/a", {"a.gguf": b"new"}, ref=COMMIT)
    cached(hub, "org/b", {"config.json": b"{}"})
    cached(hub, "org/c", {"config.json": b"{}", "model-00001-of-00002.safetensors": b"half"})
    dangling = cached(hub, "org/d", {"config.json": b"{}", "model.safetensors": b"gone"})
    (dangling / "model.safetensors").resolve().unlink()
    add_folder(root, hub)
    (model,) = ModelStore(root).list()
    assert model.name == "org/a:a.gguf"
    assert model.path.read_bytes() == b"new"


def test_a_plain_directory_of_models(root: DataRoot, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    write(folder / "Llama 3.2 (1B).Q4_K_M.GGUF", b"1234")
    write(folder / "lmstudio/org/big-00001-of-00002.gguf", b"12")
    write(folder / "lmstudio/org/big-00002-of-00002.gguf", b"345")
    write(folder / "lmstudio/org/half-00001-of-00002.gguf")
    write(folder / "lmstudio/org/mmproj-f16.gguf")
    write(folder / "Qwen3-0.6B/config.json", b"{}")
    write(folder / "Qwen3-0.6B/model.safetensors")
    write(folder / "copies/qwen3-0.6b/config.json", b"{}")
    write(folder / "copies/qwen3-0.6b/model.safetensors")
    write(folder / ".trash/gone.gguf")
    write(folder / "notes.txt")
    before = tree(folder)

    added = add_folder(root, folder)
    store = ModelStore(root)

    assert sorted(model.name for model in added) == names(store)
    assert names(store) == ["big", "llama-3.2-1b-.q4_k_m", "qwen3-0.6b", "qwen3-0.6b-2"]
    assert store.find("big").size_bytes == 5
    assert store.find("BIG").path.name == "big-00001-of-00002.gguf"
    assert store.find("llama-3.2-1b-.q4_k_m").path.read_bytes() == b"1234"
    assert store.find("qwen3-0.6b").path == folder / "Qwen3-0.6B"
    assert tree(folder) == before


def test_a_directory_that_is_itself_a_model(root: DataRoot, tmp_path: Path) -> None:
    write(tmp_path / "Tiny/config.json", b"{}")
    write(tmp_path / "Tiny/model.safetensors")
    add_folder(root, tmp_path / "Tiny")
    assert names(ModelStore(root)) == ["tiny"]


def test_removing_an_external_model_is_refused(root: DataRoot, tmp_path: Path) -> None:
    file = write(tmp_path / "theirs/a.gguf")
    add_folder(root, tmp_path / "theirs")
    with pytest.raises(ModelNotOwned, match="quire disk remove"):
        remove(ModelStore(root), "a")
    assert file.exists()
    remove_folder(root, tmp_path / "theirs")
    assert names(ModelStore(root)) == []
    assert file.exists()
    with pytest.raises(ModelNotFound, match="not registered"):
        remove_folder(root, tmp_path / "theirs")


def test_what_cannot_be_registered(root: DataRoot, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedFormat, match="holds no models"):
        add_folder(root, tmp_path / "empty")
    with pytest.raises(ModelNotFound, match="not a directory"):
        add_folder(root, tmp_path / "absent")
    with pytest.raises(UnsupportedFormat, match="part of the data root"):
        add_folder(root, root.hub)
    assert registered_folders(root) == ()


def test_a_folder_that_goes_away_takes_only_its_models(root: DataRoot, tmp_path: Path) -> None:
    write(tmp_path / "one/a.gguf")
    write(tmp_path / "two/b.gguf")
    for folder in ("one", "two", "one"):
        add_folder(root, tmp_path / folder)
    assert registered_folders(root) == (tmp_path / "one", tmp_path / "two")
    (tmp_path / "one").rename(tmp_path / "unmounted")
    assert names(ModelStore(root)) == ["b"]
    with pytest.raises(ModelNotFound, match=f"{tmp_path}/one.*mount"):
        ModelStore(root).find("a")


def test_a_list_that_cannot_be_read_is_one_sentence(root: DataRoot) -> None:
    root.external_list.write_text("{")
    with pytest.raises(DataRootUnusable, match="quire disk add"):
        ModelStore(root).list()


@given(st.text(min_size=1, max_size=80))
def test_every_file_gets_a_name_that_can_be_typed(stem: str) -> None:
    assert parse_model_name(_alias(stem)).kind in ("alias", "hub")


def test_a_folder_without_models_scans_to_nothing(tmp_path: Path) -> None:
    assert scan_folder(tmp_path / "absent") == []
