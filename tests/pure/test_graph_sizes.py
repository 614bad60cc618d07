"""Batch sizes survive a restart, and nothing that happens to their file stops an engine."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from engine.runner.graph_sizes import MAX_MODELS, MAX_SIZES, GraphSizeMemory

KEY = GraphSizeMemory.key("/models/qwen", "bfloat16", "NVIDIA H200")


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_sizes_are_there_at_the_next_start_latest_first(tmp_path: Path) -> None:
    directory = tmp_path / "absent"
    memory = GraphSizeMemory(directory)
    assert memory.load(KEY) == ()
    memory.remember(KEY, (1, 2, 64))
    memory.remember(KEY, [8, 1])
    assert GraphSizeMemory(directory).load(KEY) == (8, 1, 2, 64)
    assert GraphSizeMemory(directory).load(GraphSizeMemory.key("/models/qwen", "float16", "NVIDIA H200")) == ()
    assert only_file(directory).suffix == ".json"


def test_what_is_known_already_is_not_written_again(tmp_path: Path) -> None:
    memory = GraphSizeMemory(tmp_path)
    memory.remember(KEY, (1, 2))
    path = only_file(tmp_path)
    written_at = path.stat().st_mtime_ns
    memory.remember(KEY, (1,))
    memory.remember(KEY, ())
    assert path.stat().st_mtime_ns == written_at


def test_sizes_and_models_are_bounded_and_the_oldest_go_first(tmp_path: Path) -> None:
    memory = GraphSizeMemory(tmp_path)
    memory.remember(KEY, range(1, 1000))
    assert memory.load(KEY) == tuple(range(1, MAX_SIZES + 1))
    memory.remember(KEY, (5000,))
    assert memory.load(KEY) == (5000, *range(1, MAX_SIZES))
    for index in range(MAX_MODELS):
        memory.remember(f"model {index}", (1,))
    assert memory.load(KEY) == ()
    assert memory.load("model 0") == (1,)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[1]", b'{"k": 3}', b'{"k": [0, 1]}', b'{"k": [true]}', b"[" * 100_000]
)
def test_a_corrupt_file_starts_empty_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    memory = GraphSizeMemory(tmp_path)
    memory.remember("k", (1,))
    path = only_file(tmp_path)
    path.write_bytes(content)
    assert memory.load("k") == ()
    memory.remember("k", (4,))
    assert json.loads(path.read_text()) == {"k": [4]}


def test_a_directory_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    memory = GraphSizeMemory(tmp_path / "file" / "below")
    with caplog.at_level(logging.WARNING):
        memory.remember(KEY, (1,))
        memory.remember(KEY, (2,))
    assert memory.load(KEY) == ()
    assert len(caplog.records) == 1


def test_without_a_directory_nothing_is_kept() -> None:
    memory = GraphSizeMemory(None)
    memory.remember(KEY, (1,))
    assert memory.load(KEY) == ()
