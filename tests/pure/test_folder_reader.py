"""Folders that do not answer: never waited for twice, named once, and read again when they come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from store.errors import ModelNotFound
from store.external import ExternalModel
from store.external_folders import ExternalFolders, add_folder
from store.folder_reader import FolderPatience, FolderReader, look_into
from store.names import parse_model_name
from store.paths import DataRoot


class StuckDisk:
    """Looks into folders, but hangs at that named `stuck`, before it answers or after, until it is released."""

    def __init__(self, *, answers_first: bool = False) -> None:
        self.released = threading.Event()
        self.answers_first = answers_first
        self.num_looks = 0

    def __call__(self, folder: Path, on_answer: Callable[[], None]) -> list[ExternalModel] | None:
        if folder.name == "stuck":
            self.num_looks += 1
            if self.answers_first:
                on_answer()
            assert self.released.wait(60)
        return look_into(folder, on_answer)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("stuck", "sound"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of-{name}.gguf").write_bytes(b"weights")
    return tmp_path / "stuck", tmp_path / "sound"


@pytest.fixture(params=[False, True], ids=["silent", "falls-silent"])
def disk(request: pytest.FixtureRequest) -> Iterator[StuckDisk]:
    disk = StuckDisk(answers_first=request.param)
    yield disk
    disk.released.set()


def test_a_folder_that_does_not_answer_costs_its_models_alone(disk: StuckDisk, folders: tuple[Path, Path]) -> None:
    told: list[str] = []
    reader = FolderReader(told.append, FolderPatience(answer_s=0.05, scan_s=0.1), disk)

    for _ in range(3):
        silent, sound = reader.scan(folders)
        assert (silent.state, silent.models) == ("silent", ())
        assert (sound.state, [model.name for model in sound.models]) == ("there", ["of-sound"])

    assert disk.num_looks == 1
    assert len(told) == 1 and f"{folders[0]} does not answer" in told[0]


def test_a_folder_that_comes_back_is_read_again(disk: StuckDisk, folders: tuple[Path, Path]) -> None:
    reader = FolderReader(patience=FolderPatience(answer_s=0.05, scan_s=0.1), look=disk)
    assert reader.scan(folders[:1])[0].state == "silent"
    disk.released.set()
    while (scan := reader.scan(folders[:1])[0]).state == "silent":
        pass
    assert [model.name for model in scan.models] == ["of-stuck"]


def test_a_model_of_a_silent_folder_is_missing_with_a_reason(
    disk: StuckDisk, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    root = DataRoot.open(tmp_path / "quire")
    for folder in folders:
        add_folder(root, folder)
    external = ExternalFolders(root, FolderReader(patience=FolderPatience(answer_s=0.05, scan_s=0.1), look=disk))
    name = parse_model_name("of-stuck")
    assert external.find(name, name) is None
    assert external.missing() == [folders[0]]


def test_folders_that_are_not_there_and_ones_that_refuse(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert [scan.state for scan in FolderReader().scan([tmp_path / "absent", tmp_path / "file"])] == ["missing"] * 2
    with pytest.raises(ModelNotFound, match="is not a directory"):
        add_folder(DataRoot.open(tmp_path / "quire"), tmp_path / "absent")
