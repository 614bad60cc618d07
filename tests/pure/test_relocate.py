"""Moving a data root: nothing lost, nothing doubled, whatever happens in between."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from store.disk.relocate import MoveReport, move_data_root, pending_move
from store.errors import BrokenFile, DataRootUnusable, ModelBusy, NotEnoughSpace
from store.models import Manifest, ManifestFile, ModelStore
from store.paths import DataRoot
from store.upkeep.removal import remove
from tests.fakes.hub import COMMIT, sha256

REPOSITORY = Path(__file__).parents[2]
FILES = {f"org/m{number}": random.Random(number).randbytes(3000 * number + 1) for number in range(1, 8)}


@pytest.fixture
def root(tmp_path: Path) -> DataRoot:
    """A data root with models, a link, a second name of a file, a partial download and a log."""
    (tmp_path / "old").mkdir()
    root = DataRoot.open(tmp_path / "old/quire")
    for repo, content in FILES.items():
        add_model(root, repo, content)
    (root.downloads / "half.partial").write_bytes(b"half")
    (root.kernels / "cpu").mkdir()
    (root.kernels / "cpu/add.o").write_bytes(b"code")
    os.link(root.kernels / "cpu/add.o", root.kernels / "cpu/again.o")
    (root.logs / "daemon.log").write_text("started")
    return root


@pytest.fixture(params=["other disk", "same disk"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "other disk":
        refuse_links_from(tmp_path / "old", monkeypatch)
    (tmp_path / "new").mkdir()
    return tmp_path / "new/quire"


def refuse_links_from(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `disk` were a file system of its own."""
    link = os.link

    def checked(existing: Path, new: Path) -> None:
        if Path(existing).is_relative_to(disk) != Path(new).is_relative_to(disk):
            raise OSError(18, "Invalid cross-device link")
        link(existing, new)

    monkeypatch.setattr("store.disk.file_copy.os.link", checked)


def add_model(root: DataRoot, repo: str, content: bytes) -> None:
    directory = root.hub / f"models--{repo.replace('/', '--')}"
    snapshot = directory / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (directory / "blobs").mkdir()
    (directory / "blobs" / sha256(content)).write_bytes(content)
    (snapshot / "m.gguf").symlink_to(f"../../blobs/{sha256(content)}")
    file = ManifestFile("m.gguf", sha256(content), len(content))
    ModelStore(root).register(Manifest(repo, repo, repo, COMMIT, "hub", (file,), "m.gguf", 1.0))


def contents(root: DataRoot) -> dict[str, bytes | str]:
    """Every file and link that belongs to a data root."""
    found: dict[str, bytes | str] = {}
    for path in (path for folder in root.folders for path in folder.rglob("*")):
        name = path.relative_to(root.root).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def move(current: Path, target: Path, *, keep: bool = False, switch: Callable[[], None] = lambda: None) -> MoveReport:
    return move_data_root(current, target, switch=switch, on_progress=lambda *_: None, keep=keep)


def test_everything_is_there_and_the_old_copy_is_gone(root: DataRoot, target: Path, tmp_path: Path) -> None:
    before = contents(root)
    (root.root / "notes.txt").write_text("mine")
    switched: list[bool] = []

    report = move(root.root, target, switch=lambda: switched.append(root.hub.exists() and (target / "hub").exists()))

    assert switched == [True]
    assert contents(DataRoot(target)) == before
    assert (target / "kernels/cpu/add.o").samefile(target / "kernels/cpu/again.o")
    assert [path.name for path in root.root.iterdir()] == ["notes.txt"] == list(report.left_behind)
    assert pending_move(target) is None
    assert [model.name for model in ModelStore(DataRoot.open(target)).list()] == list(FILES)
    with pytest.raises(DataRootUnusable, match=f"was moved to {target}"):
        DataRoot.open(root.root)


def test_keep_leaves_two_whole_roots(root: DataRoot, target: Path) -> None:
    before = contents(root)
    move(root.root, target, keep=True)
    assert contents(root) == contents(DataRoot(target)) == before
    assert not (target / "logs/daemon.log").samefile(root.logs / "daemon.log")
    assert DataRoot.open(root.root) != DataRoot.open(target)


def test_there_and_back_again(root: DataRoot, target: Path) -> None:
    before = contents(root)
    move(root.root, target)
    move(target, root.root)
    assert contents(DataRoot.look(root.root)) == before
    assert not target.exists()
    root.root.rename(root.root.with_name("away"))
    with pytest.raises(DataRootUnusable, match="is gone"):
        DataRoot.look(root.root)


KILLED_AT = """
import os, signal, sys
from pathlib import Path
from store.disk.file_copy import Copier
from store.disk.relocate import move_data_root

target, choice = map(Path, sys.argv[1:3])
countdown, is_linked = map(int, sys.argv[3:])
left = [countdown]

def count(event, arguments):
    # Everything that changes a disk passes here, and reading does too.
    if event.startswith(("open", "os.", "shutil.")):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

def switch():
    new = choice.with_suffix(".new")
    new.write_text(str(target))
    new.replace(choice)

if not is_linked:
    def refuse(*arguments):
        raise OSError(18, "Invalid cross-device link")
    os.link = refuse
sys.addaudithook(count)
move_data_root(Path(choice.read_text()), target, switch=switch, on_progress=lambda *_: None)
"""


@pytest.mark.parametrize("seed", range(2))
def test_a_kill_at_any_moment_loses_nothing(root: DataRoot, tmp_path: Path, seed: int) -> None:
    """The root that commands would use is whole after every kill, and in the end the move is done."""
    before = contents(root)
    (tmp_path / "new").mkdir()
    target = tmp_path / "new/quire"
    choice = tmp_path / "choice"
    choice.write_text(str(root.root))
    chance = random.Random(seed)
    num_kills = 0
    while True:
        arguments = [str(target), str(choice), str(chance.randrange(1, chance.choice((20, 400)))), str(seed % 2)]
        done = subprocess.run(
            [sys.executable, "-c", KILLED_AT, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        in_force = DataRoot(Path(choice.read_text()))
        assert contents(in_force) == before
        assert len(ModelStore(DataRoot.look(in_force.root)).list()) == len(FILES)
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
        num_kills += 1
        assert num_kills < 60, "it never gets any further"
    assert num_kills
    assert contents(DataRoot(target)) == before
    assert not root.root.exists()
    assert pending_move(target) is None


def interrupt(after_calls: int) -> Callable[..., None]:
    left = [after_calls]

    def count(*_: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    return count


def test_what_changed_between_two_attempts_is_moved_as_it_is_now(root: DataRoot, target: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        move_data_root(root.root, target, switch=lambda: None, on_progress=interrupt(14))
    assert pending_move(target) is not None
    with pytest.raises(DataRootUnusable, match="unfinished copy"):
        DataRoot.open(target)
    remove(ModelStore(root), "org/m1")
    add_model(root, "org/late", b"late")
    (root.logs / "daemon.log").write_text("stopped")
    now = contents(root)
    move(root.root, target)
    assert contents(DataRoot(target)) == now


def test_a_large_file_goes_on_where_it_stopped(root: DataRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_links_from(tmp_path / "old", monkeypatch)
    monkeypatch.setattr("store.disk.file_copy._CHUNK_BYTES", 1000)
    target = tmp_path / "quire"
    with pytest.raises(KeyboardInterrupt):
        move_data_root(root.root, target, switch=lambda: None, on_progress=interrupt(15))
    (begun,) = target.rglob("*.moving")
    begun_bytes = begun.stat().st_size
    assert begun_bytes > 2000
    steps: list[int] = []
    move_data_root(
        root.root,
        target,
        switch=lambda: None,
        on_progress=lambda stage, done, _total: steps.append(done) if stage == "copying" else None,
    )
    assert begun_bytes in steps
    assert not list(target.rglob("*.moving"))


def test_a_beginning_of_other_bytes_is_not_built_upon(
    root: DataRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_links_from(tmp_path / "old", monkeypatch)
    before = contents(root)
    target = tmp_path / "quire"
    with pytest.raises(KeyboardInterrupt):
        move_data_root(root.root, target, switch=lambda: None, on_progress=interrupt(1))
    (begun,) = target.rglob("*.moving")
    begun.write_bytes(b"zeros from a crash")
    move(root.root, target)
    assert contents(DataRoot(target)) == before


def test_a_disk_that_loses_bytes_is_noticed_and_nothing_is_removed(
    root: DataRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_links_from(tmp_path / "old", monkeypatch)
    before = contents(root)
    monkeypatch.setattr("store.disk.file_copy._sha256", lambda path, _count: f"{path} as it came back")
    with pytest.raises(BrokenFile, match="differs from the original"):
        move(root.root, tmp_path / "quire")
    assert contents(root) == before


def test_a_blob_that_was_damaged_before_is_moved_and_reported(root: DataRoot, target: Path) -> None:
    blob = next(root.hub.glob("models--org--m1/blobs/*"))
    blob.write_bytes(b"x" * blob.stat().st_size)
    report = move(root.root, target)
    is_copied = bool(report.copied_bytes)
    assert [path.name for path in report.damaged] == ([blob.name] if is_copied else [])


def test_too_little_room_is_said_before_the_first_byte(
    root: DataRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    monkeypatch.setattr(
        "store.disk.relocate.shutil.disk_usage", lambda _: namedtuple("Usage", "total used free")(10**9, 0, 64 * 2**20)
    )
    with pytest.raises(NotEnoughSpace, match=r"The move needs .* has 67 MB free; .*quire disk list"):
        move(root.root, tmp_path / "quire", keep=True)
    assert not (tmp_path / "quire").exists()


def test_a_disk_without_links_is_refused_and_left_as_it_was(
    root: DataRoot, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("store.disk.relocate.Path.symlink_to", refuse)
    with pytest.raises(DataRootUnusable, match="no symbolic links"):
        move(root.root, target)
    assert not target.exists()


def test_a_disk_that_fills_up_keeps_the_old_root_and_the_move_goes_on(
    root: DataRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_links_from(tmp_path / "old", monkeypatch)
    before = contents(root)

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("store.disk.file_copy.Copier._append_rest", fill)
        with pytest.raises(NotEnoughSpace, match="goes on where it stopped"):
            move_data_root(root.root, tmp_path / "quire", switch=lambda: None, on_progress=lambda *_: None)
    assert contents(DataRoot.look(root.root)) == before
    move(root.root, tmp_path / "quire")
    assert contents(DataRoot.look(tmp_path / "quire")) == before


def test_a_root_in_use_is_not_moved(root: DataRoot, target: Path) -> None:
    with root.in_use(), pytest.raises(ModelBusy, match="quire shutdown"):
        move(root.root, target)
    assert not target.exists()


def test_targets_that_are_refused(root: DataRoot, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    other = DataRoot.open(tmp_path / "other").root
    for target, reason in (
        (root.root, "is the data root already"),
        (root.root / "inside", "contain one another"),
        (root.root.parent, "contain one another"),
        (tmp_path / "full", "is not empty"),
        (other, "quire disk use"),
        (tmp_path / "absent/quire", "There is no directory"),
    ):
        with pytest.raises(DataRootUnusable, match=reason):
            move(root.root, target)
    with pytest.raises(DataRootUnusable, match="no data root at"):
        move(tmp_path / "never", tmp_path / "quire")


def test_another_roots_unfinished_copy_is_left_alone(root: DataRoot, target: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        move_data_root(root.root, target, switch=lambda: None, on_progress=interrupt(5))
    with pytest.raises(DataRootUnusable, match=f"quire disk use {root.root}"):
        move(DataRoot.open(tmp_path / "other").root, target)


def test_links_into_the_old_root_are_made_relative(root: DataRoot, target: Path, tmp_path: Path) -> None:
    (root.hub / "inside").symlink_to(root.logs / "daemon.log")
    (root.hub / "outside").symlink_to(tmp_path)
    move(root.root, target)
    assert (target / "hub/inside").read_text() == "started"
    assert (target / "hub/outside").readlink() == tmp_path
