"""GGUF models in several files: their names, and that only what belongs together is put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import BrokenFile
from store.formats.gguf_parts import read_gguf_metadata, read_gguf_model
from store.formats.limits import MAX_PARTS
from store.formats.part_names import PartName, parse_part_name, part_names, part_paths
from tests.fakes.gguf_files import F32_TENSOR, gguf_bytes, keys_of, tensor


@given(stem=st.text(min_size=1, max_size=8).filter(lambda stem: "\n" not in stem), count=st.integers(1, MAX_PARTS))
def test_every_part_names_all_parts(stem: str, count: int) -> None:
    names = PartName(stem, 1, count, ".gguf").siblings()
    assert len(set(names)) == len(names) == count
    for number in {1, count}:
        assert parse_part_name(names[number - 1]) == PartName(stem, number, count, ".gguf")
        assert part_names(names[number - 1]) == names


@pytest.mark.parametrize(
    "name",
    ["model.gguf", "m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-1-of-2.gguf", "m-00001-of-99999.gguf"],
)
def test_a_whole_file_stands_for_itself(name: str, tmp_path: Path) -> None:
    assert parse_part_name(name) is None
    assert part_names(name) == [name]
    assert part_paths(tmp_path / name) == [tmp_path / name]


def test_folders_belong_to_the_stem() -> None:
    assert part_names("Q4_K_M/m-00002-of-00002.gguf") == [f"Q4_K_M/m-0000{number}-of-00002.gguf" for number in (1, 2)]


def write_part(folder: Path, number: int, *names: str, **split: Any) -> Path:
    """Part `number` of two, with tensors of 16 bytes; `split` overrides what it says of itself."""
    said = {"no": number - 1, "count": 2, "tensors.count": 3} | {key.replace("__", "."): split[key] for key in split}
    keys = keys_of({f"split.{key}": value for key, value in said.items()} | {"general.part": number})
    rows = [tensor(name, (4,), F32_TENSOR, 32 * index) for index, name in enumerate(names)]
    path = folder / f"m-{number:05d}-of-00002.gguf"
    path.write_bytes(gguf_bytes(keys, rows, bytes(32 * len(names))))
    return path


def test_parts_are_one_model_whichever_is_opened(tmp_path: Path) -> None:
    first, second = write_part(tmp_path, 1, "a"), write_part(tmp_path, 2, "b", "c")
    for opened in (first, second):
        model = read_gguf_model(opened)
        assert model.paths == (first, second)
        assert {name: entry.part for name, entry in model.header.tensors.items()} == {"a": 0, "b": 1, "c": 1}
        assert model.header.metadata["general.part"] == read_gguf_metadata(opened)["general.part"] == 1
        assert all(entry.num_bytes == 16 for entry in model.header.tensors.values())


def test_the_first_part_may_hold_metadata_alone(tmp_path: Path) -> None:
    write_part(tmp_path, 1)
    assert len(read_gguf_model(write_part(tmp_path, 2, "a", "b", "c")).header.tensors) == 3


@pytest.mark.parametrize(
    ("first", "second", "split", "words"),
    [
        (["a"], ["b", "c"], {"no": 0}, "part 1 of 2, and its name says part 2 of 2"),
        (["a"], ["b", "c"], {"count": 3}, "part 2 of 3"),
        (["a"], ["b", "c"], {"no": "x"}, "an unknown number"),
        (["a"], ["a", "c"], {}, "'a' is in two parts"),
        (["a"], ["b"], {}, "promises 3 tensors but its parts hold 2"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    first: list[str], second: list[str], split: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_part(tmp_path, 1, *first)
    write_part(tmp_path, 2, *second, **split)
    with pytest.raises(BrokenFile, match=words):
        read_gguf_model(path)


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    renamed = write_part(tmp_path, 1, "a").rename(tmp_path / "model.gguf")
    with pytest.raises(BrokenFile, match="the names that they were published under"):
        read_gguf_model(renamed)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match=r"m-00002-of-00002\.gguf cannot be read"):
        read_gguf_model(write_part(tmp_path, 1, "a"))
