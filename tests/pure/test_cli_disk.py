"""`quire disk ...` and the first question, as a person sees them."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.cli.failure import CommandFailure
from app.cli.first_run import settle_data_root
from app.config_file import remember_setting
from app.errors import SettingsError
from app.settings import load_settings
from store.disk.filesystems import Disk
from store.paths import DataRoot
from tests.fakes.command_here import quire

GB = 10**9


@pytest.fixture(autouse=True)
def _own_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("QUIRE_CONFIG_DIR", "QUIRE_STATE_DIR", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("QUIRE_HOME", "QUIRE_HOST", "QUIRE_PORT", "QUIRE_DEBUG", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def big(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    """A large disk beside the home's, whose 12 GB are little."""
    (tmp_path / "big").mkdir()
    home = Disk(Path("/"), "ext4", 12 * GB, 50 * GB, tmp_path / "XDG_DATA_HOME/quire", is_home=True)
    big = Disk(tmp_path / "big", "xfs", 900 * GB, 1000 * GB, tmp_path / "big/quire", is_rotational=True)
    monkeypatch.setattr("store.disk.filesystems.read_disks", lambda: [home, big])
    monkeypatch.setattr("store.disk.filesystems.free_bytes_at", lambda _: home.free_bytes)
    return big


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a person at the terminal who gives these answers; None is the end of the input."""

    def give(*given: str | None) -> None:
        waiting: Iterator[str | None] = iter(given)
        monkeypatch.setattr("app.cli.first_run.can_ask", lambda: True)
        monkeypatch.setattr("app.cli.first_run.ask", lambda _: next(waiting))

    return give


def config(tmp_path: Path) -> str:
    file = tmp_path / "QUIRE_CONFIG_DIR/config.toml"
    return file.read_text() if file.exists() else ""


def add_gguf(folder: Path, name: str = "tiny") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.gguf").write_bytes(b"GGUF")


def test_enter_takes_the_preselected_disk_and_it_is_remembered(
    big: Disk, answers: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers("")
    settings = settle_data_root(load_settings())
    assert settings.data_root == big.folder
    assert big.folder.is_dir()
    assert load_settings().data_root == big.folder
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f">  2  {big.mount}" in shown.err
    assert "900.0 GB  1.0 TB" in shown.err
    assert settle_data_root(load_settings()) == load_settings(), "nobody is asked twice"


def test_a_number_or_a_path_chooses_and_nonsense_is_asked_again(
    big: Disk, answers: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers("7", "x", str(tmp_path / "absent/quire"), "1")
    assert settle_data_root(load_settings()).data_root == tmp_path / "XDG_DATA_HOME/quire"
    said = capsys.readouterr().err
    for part in ("no disk 7", "neither a number nor a path", "mount its disk"):
        assert part in said


def test_a_path_may_be_typed(big: Disk, answers: Callable[..., None], tmp_path: Path) -> None:
    answers(str(tmp_path / "own"))
    assert settle_data_root(load_settings()).data_root == tmp_path / "own"


def test_the_end_of_the_input_chooses_nothing(big: Disk, answers: Callable[..., None], tmp_path: Path) -> None:
    answers(None)
    with pytest.raises(CommandFailure, match="quire disk use"):
        settle_data_root(load_settings())
    assert config(tmp_path) == ""


@pytest.mark.parametrize("why", ["flag", "environment", "config", "used", "json", "no choice"])
def test_nobody_is_asked_who_has_chosen_or_cannot_answer(
    big: Disk, answers: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    answers()
    flags = {"data_root": str(tmp_path / "flag")} if why == "flag" else {}
    if why == "environment":
        monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    elif why == "config":
        remember_setting("data_root", str(tmp_path / "config"))
    elif why == "used":
        DataRoot.open()
    elif why == "no choice":
        home = Disk(Path("/"), "ext4", 12 * GB, 50 * GB, tmp_path / "home", is_home=True)
        monkeypatch.setattr("store.disk.filesystems.read_disks", lambda: [home, replace(big, is_network=True)])
    settings = load_settings(flags)
    assert settle_data_root(settings, may_ask=why != "json") == settings


@pytest.mark.parametrize(("is_used", "verb"), [(False, "use"), (True, "move")])
def test_without_a_terminal_a_small_disk_gets_a_warning_with_the_command(
    big: Disk, capsys: pytest.CaptureFixture[str], is_used: bool, verb: str
) -> None:
    if is_used:
        DataRoot.open()
    settings = load_settings()
    assert settle_data_root(settings) == settings
    (line,) = capsys.readouterr().err.splitlines()
    assert "12.0 GB free" in line
    assert f"`quire disk {verb} {big.folder}`" in line


def test_a_question_needs_a_person_at_both_ends() -> None:
    code = "from app.cli.ask import ask, can_ask; print(can_ask(), ask('Which? '), ask(''))"
    ours, theirs = pty.openpty()
    try:
        os.write(ours, b"the second \n\x04")
        asked = subprocess.run([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, check=False)
        os.close(theirs)
        assert asked.returncode == 0
        assert b"Which? " in (shown := os.read(ours, 4096))
        assert b"True the second None" in shown
    finally:
        os.close(ours)
    piped = subprocess.run([sys.executable, "-c", code], input=b"yes\n", capture_output=True, check=True)
    assert piped.stdout.split() == [b"False", b"yes", b"None"]


def test_list_shows_disks_folders_and_caches_of_others(
    big: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_gguf(tmp_path / "mine")
    add_gguf(tmp_path / "gone")
    snapshot = tmp_path / "XDG_CACHE_HOME/huggingface/hub/models--org--a/snapshots" / ("a" * 40)
    add_gguf(snapshot)
    for folder in ("mine", "gone"):
        assert quire("disk", "add", str(tmp_path / folder)) == 0
    (tmp_path / "gone").rename(tmp_path / "unmounted")
    capsys.readouterr()

    assert quire("disk", "list") == 0
    shown = capsys.readouterr()
    assert "*  /" in shown.out
    assert f"Read only: {tmp_path / 'mine'} (1 model)" in shown.out
    assert f"Read only: {tmp_path / 'gone'} (not there now)" in shown.out
    assert f"`quire disk add {tmp_path}/XDG_CACHE_HOME/huggingface/hub`" in shown.err

    assert quire("disk", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [disk["in_use"] for disk in listed["disks"]] == [True, False]
    assert listed["recommended"] == str(big.mount)
    assert [entry["models"] for entry in listed["external"] + listed["found"]] == [1, None, 1]


def test_added_models_are_listed_and_not_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_gguf(tmp_path / "mine")
    assert quire("disk", "add", str(tmp_path / "mine"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["models"] == ["tiny"]
    assert quire("list") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "tiny"
    assert quire("rm", "tiny") == 1
    assert "only reads" in capsys.readouterr().err
    assert quire("disk", "remove", str(tmp_path / "mine")) == 0
    assert quire("disk", "remove", str(tmp_path / "mine")) == 1
    assert (tmp_path / "mine/tiny.gguf").exists()


def test_use_switches_says_what_stays_and_goes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = DataRoot.open().root
    add_gguf(old / "hub/models--org--a/blobs")
    assert quire("disk", "use", str(tmp_path / "new")) == 0
    said = capsys.readouterr().err
    assert f"Models are kept in {tmp_path / 'new'} from now on" in said
    assert f"Left in {old}: 1 model (4 kB)" in said
    assert load_settings().data_root == DataRoot.default_path() == tmp_path / "new"
    assert quire("disk", "use", str(old)) == 0
    assert load_settings().data_root == old
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    assert quire("disk", "use", str(tmp_path / "full")) == 1
    assert str(tmp_path / "full/quire") in capsys.readouterr().err
    monkeypatch.setenv("QUIRE_HOME", str(old))
    assert quire("disk", "use", str(tmp_path / "new")) == 0
    assert "QUIRE_HOME names" in capsys.readouterr().err


def test_usage_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = DataRoot.open()
    for path, size in (
        ("hub/models--org--a/blobs/x", 20_000),
        ("downloads/x.partial", 8192),
        ("kernels/cpu/add.o", 4096),
        ("kernels/cpu/packed.safetensors", 12_288),
        ("logs/daemon.log", 4096),
    ):
        file = root.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
    assert quire("disk", "usage", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    parts = [found["downloads"], found["kernels"], found["packed_weights"], found["logs"]]
    assert all(size > 0 for size in parts)
    assert found["models"]["org/a"] >= 20_000
    assert found["total"] == sum(parts) + found["models"]["org/a"]
    assert quire("disk", "usage") == 0
    assert "org/a" in capsys.readouterr().out


def test_move_takes_everything_and_commands_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = DataRoot.open().root
    add_gguf(old / "hub/models--org--a/blobs")
    (old / "quire.db").write_text("small")
    assert quire("disk", "move", str(tmp_path / "new")) == 0
    said = capsys.readouterr().err
    assert f"The data root is {tmp_path / 'new'} now" in said
    assert (tmp_path / "new/hub/models--org--a/blobs/tiny.gguf").exists()
    assert [path.name for path in old.iterdir()] == ["quire.db"]
    assert load_settings().data_root == tmp_path / "new"
    assert quire("disk", "move", str(tmp_path / "third"), "--keep") == 0
    assert "the old copy stays" in capsys.readouterr().err
    assert quire("disk", "move", str(tmp_path / "third/inside")) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_disk_that_is_not_mounted_is_one_sentence_for_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert quire("disk", "use", str(tmp_path / "new")) == 0
    (tmp_path / "new").rename(tmp_path / "away")
    capsys.readouterr()
    for command in (("list",), ("disk", "usage"), ("pull", "tiny"), ("run", "tiny", "hello"), ("serve",)):
        assert quire(*command) == 1
        printed = capsys.readouterr()
        assert (printed.out, len(printed.err.splitlines())) == ("", 1), command
        assert f"The data root {tmp_path / 'new'} is gone" in printed.err
    assert quire("disk", "list") == 0
    assert "is gone" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


CONFIG = """\
# mine
port = 1234  # because

[table]
key = 'value'
"""


def test_remembering_keeps_comments_and_tables(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    file.chmod(0o640)
    remember_setting("data_root", "/mnt/big", file=file)
    remember_setting("data_root", "/mnt/bigger", file=file)
    assert file.read_text() == CONFIG.replace("because\n", 'because\ndata_root = "/mnt/bigger"\n')
    assert file.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("config")] == ["config.toml"]


def test_remembering_follows_a_link_and_makes_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "dotfiles").mkdir()
    (tmp_path / "dotfiles/quire.toml").write_text("")
    (tmp_path / "config.toml").symlink_to("dotfiles/quire.toml")
    remember_setting("data_root", "/mnt/big", file=tmp_path / "config.toml")
    assert (tmp_path / "config.toml").is_symlink()
    assert (tmp_path / "dotfiles/quire.toml").read_text() == 'data_root = "/mnt/big"\n'
    remember_setting("data_root", "/mnt/big", file=tmp_path / "new.toml")
    assert (tmp_path / "new.toml").stat().st_mode & 0o777 == 0o600


def test_a_config_file_that_cannot_be_changed_says_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("port = ")
    with pytest.raises(SettingsError, match="data_root = '/mnt/big'"):
        remember_setting("data_root", "/mnt/big", file=tmp_path / "config.toml")
    assert (tmp_path / "config.toml").read_text() == "port = "
