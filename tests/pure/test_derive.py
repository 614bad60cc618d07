"""Further names for installed models: copies and presets share files and go one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.errors import BrokenFile, InvalidName, ModelBusy, ModelNotFound, NameTaken
from store.external_folders import add_folder
from store.locks import repo_lock_now
from store.models import ModelStore
from store.names import RepoId
from store.paths import DataRoot
from store.presets.derive import copy_model, create_model
from store.presets.preset import Parameters, Preset
from store.upkeep.removal import plan_removal, remove
from tests.fakes.installed import install

RHYME = Preset(system="Rhyme.", parameters=Parameters(temperature=0.5))


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(DataRoot.open(tmp_path / "quire"))


def names(store: ModelStore) -> list[str]:
    return [model.name for model in store.list()]


def test_a_copy_is_another_name_for_the_same_files(store: ModelStore) -> None:
    model = install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    copied = copy_model(store, "org/a", "Mine:latest")
    assert (copied.name, copied.base, copied.path, copied.digest) == ("mine", "org/a", model.path, model.digest)
    assert names(store) == ["mine", "org/a"]
    removal = plan_removal(store, "org/a")
    assert (removal.freed_bytes, removal.kept_bytes, removal.used_by) == (0, 4, ("mine",))
    assert remove(store, "org/a") == removal
    assert store.find("mine").path.read_bytes() == b"GGUF"
    with pytest.raises(ModelNotFound):
        store.find("org/a")
    assert remove(store, "mine").freed_bytes == 4


def test_a_creation_adds_to_its_base_and_may_be_made_again(store: ModelStore) -> None:
    install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    install(store, "org/b", "org/b", {"b.gguf": b"GGUF"}, entry="b.gguf")
    poet = create_model(store, "org/a", "poet", RHYME)
    assert (poet.preset, poet.base, poet.source) == (RHYME, "org/a", "created")
    assert poet.digest != store.find("org/a").digest
    loud = create_model(store, "poet", "loud", Preset(system="SHOUT."))
    assert loud.preset == Preset(system="SHOUT.", parameters=Parameters(temperature=0.5))
    again = create_model(store, "org/b", "poet", Preset())
    assert store.find("poet") == again
    assert again.path.name == "b.gguf"
    assert names(store) == ["loud", "org/a", "org/b", "poet"], "the manifest beside the old base is gone"


def test_an_alias_of_the_hub_never_leads_to_a_preset(store: ModelStore) -> None:
    install(store, "qwen3:0.6b", "Qwen/Qwen3-0.6B", {"config.json": b"{}"})
    create_model(store, "qwen3:0.6b", "poet", RHYME)
    remove(store, "qwen3:0.6b")
    with pytest.raises(ModelNotFound):
        store.find("qwen3:0.6b")
    assert store.find("poet").preset == RHYME


def test_a_model_at_a_path_stays_where_it_is(store: ModelStore, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"GGUF")
    poet = create_model(store, str(file), "poet", RHYME)
    assert (poet.path, poet.base, poet.size_bytes) == (file, str(file), 4)
    assert store.find("poet") == poet
    assert copy_model(store, "poet", "second").path == file
    assert remove(store, "poet").freed_bytes == 0
    assert file.exists()
    file.unlink()
    assert names(store) == []
    with pytest.raises(BrokenFile, match=r"mine\.gguf, which is not there"):
        store.find("second")
    assert remove(store, "second").freed_bytes == 0


def test_a_model_of_a_registered_folder_can_be_built_upon(store: ModelStore, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "theirs.gguf").write_bytes(b"GGUF")
    add_folder(store.root, folder)
    (theirs,) = store.list()
    poet = create_model(store, theirs.name, "poet", RHYME)
    assert poet.path == folder / "theirs.gguf"
    with pytest.raises(NameTaken):
        copy_model(store, "poet", theirs.name)


def test_names_are_not_taken_from_others(store: ModelStore) -> None:
    install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    copy_model(store, "org/a", "mine")
    with pytest.raises(NameTaken, match="quire rm mine"):
        copy_model(store, "org/a", "mine")
    with pytest.raises(InvalidName, match="catalogue"):
        copy_model(store, "org/a", "starter")
    for name in ("org/b", "./here", "hf.co/org/b:Q4_K_M"):
        with pytest.raises(InvalidName, match="short name"):
            create_model(store, "org/a", name, RHYME)
    with pytest.raises(ModelNotFound):
        copy_model(store, "org/absent", "other")
    with repo_lock_now(store.root, RepoId("org/a")), pytest.raises(ModelBusy):
        create_model(store, "org/a", "poet", RHYME)


def test_a_pulled_model_is_never_replaced(store: ModelStore) -> None:
    install(store, "pulled", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    with pytest.raises(NameTaken, match="choose another name"):
        create_model(store, "pulled", "pulled", RHYME)
