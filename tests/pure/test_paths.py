"""Where files live, and the one sentence when they cannot live there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from store.errors import DataRootUnusable
from store.paths import DataRoot, hub_token_path, user_paths


def test_open_creates_the_root_and_its_folders(tmp_path: Path) -> None:
    root = DataRoot.open(tmp_path / "quire")
    assert all(path.is_dir() for path in (root.hub, root.downloads, root.kernels, root.logs))
    assert list(root.downloads.iterdir()) == []
    assert DataRoot.open(root.root) == root


def test_quire_home_chooses_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "elsewhere"))
    assert DataRoot.open().root == tmp_path / "elsewhere"


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
