"""Where files live, and the one sentence when they cannot live there."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from store.errors import DataRootUnusable
from store.paths import MOVE_JOURNAL_NAME, DataRoot, hub_token_path, platform_data_root, root_lock, user_paths


def test_open_creates_the_root_and_its_folders(tmp_path: Path) -> None:
    root = DataRoot.open(tmp_path / "quire")
    assert all(path.is_dir() for path in (root.hub, root.presets, root.downloads, root.kernels, root.logs))
    assert root.folders == (root.hub, root.presets, root.downloads, root.kernels, root.logs)
    assert list(root.downloads.iterdir()) == []
    assert DataRoot.open(root.root) == root


def test_quire_home_chooses_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "elsewhere"))
    assert DataRoot.open().root == tmp_path / "elsewhere"


def test_the_config_file_chooses_the_root_where_the_environment_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("QUIRE_HOME", raising=False)
    assert DataRoot.default_path() == platform_data_root()
    (tmp_path / "config.toml").write_text(f"port = 1\ndata_root = '{tmp_path}/big'")
    assert DataRoot.open().root == tmp_path / "big"
    (tmp_path / "config.toml").write_text("data_root = ")
    with pytest.raises(DataRootUnusable, match="correct it"):
        DataRoot.default_path()


def test_the_platform_default_is_created_with_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "a/b"))
    assert DataRoot.open().root == tmp_path / "a/b/quire"


def test_a_missing_parent_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(DataRootUnusable, match="mount its disk"):
        DataRoot.open(tmp_path / "unmounted/quire")
    assert not (tmp_path / "unmounted").exists()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataRootUnusable, match="cannot be used"):
        DataRoot.open(tmp_path / "file")


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "make it writable"), (errno.EACCES, "make it writable")],
)
def test_a_full_or_read_only_root_gives_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("store.paths.os.fsync", refuse)
    with pytest.raises(DataRootUnusable, match=advice) as caught:
        DataRoot.open(tmp_path / "quire")
    assert str(tmp_path / "quire") in caught.value.message
    assert "QUIRE_HOME" in caught.value.message
    assert list((tmp_path / "quire/downloads").iterdir()) == []


def test_user_paths_are_private_and_follow_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "state"))
    paths = user_paths()
    assert paths.config_dir == tmp_path / "config"
    for path in (paths.state_dir, paths.runtime_dir, paths.data_dir):
        assert path.is_relative_to(tmp_path / "state")
        assert path.stat().st_mode & 0o077 == 0


def test_sockets_go_to_the_session_directory_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUIRE_STATE_DIR", raising=False)
    for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    assert user_paths().runtime_dir == tmp_path / "quire"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert user_paths().runtime_dir == tmp_path / "quire/run"


def test_unusable_user_paths_give_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CONFIG_DIR", str(tmp_path / "file/config"))
    with pytest.raises(DataRootUnusable, match="QUIRE_CONFIG_DIR"):
        user_paths()


def test_no_library_keeps_anything_large_outside_the_root(tmp_path: Path) -> None:
    root = DataRoot.open(tmp_path / "quire")
    environment = root.library_environment({"HF_HOME": "/home/someone/hf"})
    large = {name: value for name, value in environment.items() if value.startswith("/") and name != "HF_TOKEN_PATH"}
    assert len(large) >= 8
    assert all(Path(value).is_relative_to(root.root) for value in large.values())
    assert environment["HF_HUB_CACHE"] == str(root.hub)
    assert environment["HF_TOKEN_PATH"] == "/home/someone/hf/token"


def test_the_stored_token_is_looked_for_where_the_hub_library_keeps_it() -> None:
    assert hub_token_path({"HF_TOKEN_PATH": "/t"}) == Path("/t")
    assert hub_token_path({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/token")
    assert hub_token_path({}) == Path.home() / ".cache/huggingface/token"


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that counts as mounted until it is renamed."""
    disk = tmp_path / "big"
    disk.mkdir()
    is_mount = os.path.ismount
    monkeypatch.setattr(
        "store.known_roots.os.path.ismount", lambda path: is_mount(path) or Path(path) == disk.resolve()
    )
    return disk


@pytest.mark.parametrize("leaves", ["nothing", "an empty mount point", "an empty folder"])
def test_a_root_whose_disk_is_not_mounted_is_not_made_anew(
    disk: Path, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    root = DataRoot.open(disk / "quire")
    disk.rename(disk.with_name("unmounted"))
    monkeypatch.setattr("store.known_roots.os.path.ismount", lambda path: Path(path) == Path("/"))
    if leaves != "nothing":
        disk.mkdir()
    if leaves == "an empty folder":
        root.root.mkdir()
    for attempt in (DataRoot.open, DataRoot.look, lambda path: DataRoot.open(path, renew=True)):
        with pytest.raises(DataRootUnusable, match=f"The disk of {disk} is not mounted.*mount it, or.*quire disk use"):
            attempt(root.root)
    assert not root.hub.exists()
    if leaves == "nothing":
        disk.with_name("unmounted").rename(disk)
        assert DataRoot.open(root.root) == DataRoot.look(root.root) == root


def test_a_root_that_was_deleted_is_made_anew_only_when_asked_for(disk: Path) -> None:
    root = DataRoot.open(disk / "quire")
    shutil.rmtree(root.root)
    with pytest.raises(DataRootUnusable, match=f"gone although its disk {disk} is mounted.*quire disk use {root.root}"):
        DataRoot.open(root.root)
    assert DataRoot.open(root.root, renew=True).hub.is_dir()
    assert DataRoot.open(root.root) == root


def test_the_platform_default_may_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    shutil.rmtree(DataRoot.open().root)
    assert DataRoot.open().hub.is_dir()


def test_looking_at_a_root_that_was_never_used_makes_nothing(tmp_path: Path) -> None:
    assert DataRoot.look(tmp_path / "new").root == tmp_path / "new"
    assert not (tmp_path / "new").exists()


def test_the_unfinished_copy_of_a_move_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / MOVE_JOURNAL_NAME).write_text("{}")
    for attempt in (DataRoot.open, DataRoot.look):
        with pytest.raises(DataRootUnusable, match="unfinished copy of a move"):
            attempt(tmp_path / "copy")


def test_a_root_opens_where_the_home_takes_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "file/state"))
    assert DataRoot.open(tmp_path / "quire").hub.is_dir()


def test_a_root_in_use_cannot_be_moved_nor_used_while_it_moves(tmp_path: Path) -> None:
    root = DataRoot.open(tmp_path / "quire")
    with root.in_use(), root.in_use(), root_lock(root.root, fcntl.LOCK_EX) as is_held:
        assert not is_held
    with (
        root_lock(root.root, fcntl.LOCK_EX) as is_held,
        pytest.raises(DataRootUnusable, match="being moved"),
        root.in_use(),
    ):
        pass
    assert is_held
