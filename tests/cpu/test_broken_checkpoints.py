"""Damaged model files end in one of the engine's errors, in the loader and in the text stage, never in a crash."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.api.errors import BrokenCheckpoint, EngineError
from engine.loading.checkpoint import open_checkpoint
from engine.loading.loader import load_model, weight_bytes
from engine.text.stage import open_text_files
from store.errors import BrokenFile
from store.formats.gguf import read_gguf_header
from tests.fakes.checkpoints import write_gguf_checkpoint, write_hf_checkpoint, write_tokenizer

FUZZ = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with config.json, a tokenizer, model.safetensors and model.gguf."""
    directory = tmp_path_factory.mktemp("sound")
    write_hf_checkpoint(directory, "llama")
    write_tokenizer(directory)
    write_gguf_checkpoint(directory / "model.gguf", directory, "Q8_0")
    return directory


def load(path: Path) -> None:
    """As the engine does: what it will take is known before memory is."""
    checkpoint = open_checkpoint(path)
    if weight_bytes(checkpoint, torch.float32) < 16 * MEBIBYTE:
        load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32, on_progress=lambda done, total: None)


def survives(call: Callable[[Path], object], path: Path) -> None:
    with suppress(EngineError, BrokenFile):
        call(path)


@st.composite
def patches(draw: st.DrawFn, num_bytes: int) -> list[tuple[int, bytes]]:
    places = st.tuples(
        st.integers(0, num_bytes - 1), st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8))
    )
    return draw(st.lists(places, min_size=1, max_size=3))


@FUZZ
@given(data=st.data())
def test_a_gguf_file_with_a_damaged_header(data: st.DataObject, sound: Path, tmp_path: Path) -> None:
    whole = (sound / "model.gguf").read_bytes()
    header_bytes = min(tensor.offset for tensor in read_gguf_header(sound / "model.gguf").tensors.values())
    content = bytearray(whole)
    for position, patch in data.draw(patches(header_bytes)):
        content[position : position + len(patch)] = patch
    path = tmp_path / "model.gguf"
    path.write_bytes(content[: len(whole)])
    survives(load, path)
    survives(open_text_files, path)


@FUZZ
@given(data=st.data())
def test_a_checkpoint_with_a_damaged_header_and_config(data: st.DataObject, sound: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer_config.json", "tokenizer.json"):
        content = bytearray((sound / name).read_bytes())
        size = 8 + int.from_bytes(content[:8], "little") if name.endswith(".safetensors") else len(content)
        if data.draw(st.booleans()):
            for position, patch in data.draw(patches(size)):
                content[position : position + len(patch)] = patch
        (tmp_path / name).write_bytes(content)
    survives(load, tmp_path)
    survives(open_text_files, tmp_path)


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
@pytest.mark.parametrize("missing_bytes", [1, 4096, 100_000])
def test_truncated_tensors_are_refused(name: str, missing_bytes: int, sound: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((sound / "config.json").read_bytes())
    path = tmp_path / name
    path.write_bytes((sound / name).read_bytes()[:-missing_bytes])
    with pytest.raises(BrokenCheckpoint, match=name):
        load(path if name.endswith(".gguf") else tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b"", b"[]", b'{"a":' * 50_000])
def test_json_that_is_none_is_refused(name: str, content: bytes, sound: Path, tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((sound / file).read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BrokenCheckpoint, match=name):
        load(tmp_path) if name == "config.json" else open_text_files(tmp_path)


def test_a_header_of_huge_sizes_takes_no_memory(sound: Path, tmp_path: Path) -> None:
    """A feed-forward length of 60 million asks for TBs: it is known before any is allocated."""
    content = (sound / "model.gguf").read_bytes()
    place = content.index(b"llama.feed_forward_length") + len("llama.feed_forward_length") + 4
    (tmp_path / "model.gguf").write_bytes(content[:place] + struct.pack("<I", 60_000_000) + content[place + 4 :])
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert weight_bytes(checkpoint, torch.float32) > 10**10
