"""Packed models come back from the cache as they were; what is stale, damaged or half written never does."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from engine.loading import packed_cache
from engine.loading.checkpoint import open_checkpoint
from engine.loading.gguf_checkpoint import GgufCheckpoint
from engine.loading.loader import load_model
from engine.loading.packed_cache import PackedCache
from engine.loading.packed_state import named_tensors
from engine.models.decoder import DecoderModel
from engine.runner.weight_memory import LastingWeights
from store.formats.safetensors import read_safetensors_header
from store.upkeep.prune_caches import packed_sources
from tests.fakes.checkpoints import write_gguf_checkpoint, write_hf_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    write_hf_checkpoint(tmp_path, "qwen2")
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path, "Q4_1")
    return tmp_path / "model.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "packed"


def load(path: Path, folder: Path | None) -> DecoderModel:
    """Load, and wait until the entry is written."""
    model = load_model(
        open_checkpoint(path),
        device=CPU,
        dtype=torch.float32,
        on_progress=lambda done, total: None,
        quantization="auto",
        packed_folder=folder,
    )
    for thread in threading.enumerate():
        if thread.name == "packed-cache-writer":
            thread.join()
    return model


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def assert_equal(found: DecoderModel, expected: DecoderModel) -> None:
    left, right = named_tensors(found), named_tensors(expected)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def count_packings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A list that grows by one whenever a GGUF file is read to be packed."""
    read: list[Path] = []
    original = GgufCheckpoint.coded_tensors

    def counted(self: GgufCheckpoint):  # type: ignore[no-untyped-def]
        read.extend(self.files())
        return original(self)

    monkeypatch.setattr(GgufCheckpoint, "coded_tensors", counted)
    return read


def test_the_second_load_maps_what_the_first_one_packed(
    model_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packings = count_packings(monkeypatch)
    first = load(model_path, folder)
    (entry,) = entries(folder)
    assert packed_sources(entry) == [model_path.resolve()]
    second = load(model_path, folder)
    assert packings == [model_path]
    assert_equal(second, first)
    assert second.missing_weights() == []
    assert second.weight_bytes == first.weight_bytes


def test_packed_matrices_begin_at_cache_lines(model_path: Path, folder: Path) -> None:
    load(model_path, folder)
    stored = read_safetensors_header(entries(folder)[0])
    assert all(tensor.offset % 64 == 0 for tensor in stored.values() if tensor.dtype == "U8")
    model = load(model_path, folder)
    for _, layer in model.packed_layers():
        assert all(segment.data.data_ptr() % 64 == 0 for segment in layer.weight.segments)


def test_a_changed_file_is_packed_anew_and_the_old_entry_goes(model_path: Path, folder: Path) -> None:
    load(model_path, folder)
    (old,) = entries(folder)
    write_hf_checkpoint(model_path.parent, "qwen2", seed=1)
    write_gguf_checkpoint(model_path, model_path.parent, "Q4_1")
    changed = load(model_path, folder)
    (new,) = entries(folder)
    assert new != old
    assert_equal(load(model_path, folder), changed)
    assert_equal(changed, load(model_path, None))


def test_entries_of_other_files_stay(model_path: Path, folder: Path) -> None:
    other = model_path.with_name("other.gguf")
    shutil.copy(model_path, other)
    load(model_path, folder)
    load(other, folder)
    assert len(entries(folder)) == 2


@pytest.mark.parametrize("damage", ["empty", "short", "header", "other model", "other type"])
def test_a_damaged_entry_is_packed_anew(
    damage: str, model_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(model_path, folder)
    (entry,) = entries(folder)
    content = entry.read_bytes()
    sound = content
    if damage == "empty":
        content = b""
    elif damage == "short":
        content = content[:-1]
    elif damage == "header":
        content = content[:8] + b"?" + content[9:]
    elif damage == "other model":
        content = content.replace(b"layers.1.", b"layers.7.")
    else:
        content = content.replace(b'"F32"', b'"I32"')
    entry.write_bytes(content)
    packings = count_packings(monkeypatch)
    with caplog.at_level(logging.WARNING):
        found = load(model_path, folder)
    assert packings == [model_path]
    assert "packed anew" in caplog.text
    assert_equal(found, expected)
    assert entry.read_bytes() == sound


def test_a_full_or_forbidden_disk_costs_a_warning(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    expected = load(model_path, None)
    assert_equal(load(model_path, blocked / "packed"), expected)
    folder = tmp_path / "full"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda path: usage(0, 0, 1000))
    assert_equal(load(model_path, folder), expected)
    assert len(caplog.records) == 2
    assert all("every start packs it anew" in record.message for record in caplog.records)
    assert entries(folder) == []


def test_a_write_that_fails_midway_leaves_nothing(
    model_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(packed_cache.os, "fsync", fail)
    load(model_path, folder)
    assert entries(folder) == []
    assert "no space left" in caplog.text


def test_leftovers_of_killed_writers_go_when_they_are_old(model_path: Path, folder: Path) -> None:
    load(model_path, folder)
    (entry,) = entries(folder)
    old, recent = (entry.with_name(f"{entry.name}.{name}.unfinished") for name in ("old", "recent"))
    for path in (old, recent):
        path.write_bytes(b"half")
    long_ago = time.time() - 300
    os.utime(old, (long_ago, long_ago))
    cache = PackedCache(folder, [model_path])
    cache.store(load(model_path, folder))
    assert entries(folder) == [entry, recent]


def test_writers_at_once_leave_one_sound_entry(model_path: Path, folder: Path) -> None:
    model = load(model_path, None)
    cache = PackedCache(folder, [model_path])
    writers = [threading.Thread(target=cache.store, args=(model,)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(entries(folder)) == 1
    assert_equal(load(model_path, folder), model)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux which pages of a file are in memory")
def test_weights_that_are_mapped_leave_memory_while_the_model_sleeps(model_path: Path, folder: Path):
    packed = load(model_path, folder)
    assert LastingWeights(packed.weight_bytes, tuple(packed.weight_maps)).sleep() == packed.weight_bytes
    mapped = load(model_path, folder)
    assert_equal(mapped, packed)
    (entry,) = entries(folder)
    assert resident_bytes(entry) > 0.9 * entry.stat().st_size
    weights = LastingWeights(mapped.weight_bytes, tuple(mapped.weight_maps))
    assert weights.sleep() == 0
    assert resident_bytes(entry) <= mmap.PAGESIZE
    weights.wake()
    assert_equal(mapped, packed)


def resident_bytes(path: Path) -> int:
    """How much of a mapped file is in this process's memory: https://man7.org/linux/man-pages/man5/proc_pid_smaps.5.html"""
    sections = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(1024 * int(re.search(r"^Rss:\s+(\d+) kB", section, re.MULTILINE)[1]) for section in sections)
