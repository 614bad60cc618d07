"""The GGUF header reader: right on sound files, and `BrokenFile` without large allocations on all others."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.errors import BrokenFile
from store.formats.gguf import GgufTensor, read_gguf_header
from store.formats.gguf_strings import GgufStrings
from tests.fakes.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    F32_TENSOR,
    I32,
    Q4_0_TENSOR,
    STRING,
    U8,
    U32,
    array,
    key,
    tensor,
    text,
)
from tests.fakes.gguf_files import gguf_bytes as gguf

KEYS = [
    key("general.architecture", STRING, "llama"),
    key("llama.block_count", U32, 2),
    key("llama.rope.freq_base", F32, 500_000.0),
    key("tokenizer.ggml.add_bos_token", BOOL, True),
    array("tokenizer.ggml.tokens", STRING, ["a", "Ġthe", "", "語"]),
    array("tokenizer.ggml.token_type", I32, [1, 3, -1]),
]
TENSORS = [tensor("a", (64, 2), Q4_0_TENSOR, 0), tensor("b", (3,), F32_TENSOR, 96)]
SOUND = gguf(KEYS, TENSORS, bytes(96 + 12))


def write(directory: Path, content: bytes) -> Path:
    path = directory / "model.gguf"
    path.write_bytes(content)
    return path


def test_sound_file_is_read_whole(tmp_path: Path) -> None:
    header = read_gguf_header(write(tmp_path, SOUND))
    assert (header.version, header.alignment) == (3, 32)
    assert header.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.rope.freq_base": 500_000.0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.tokens": ["a", "Ġthe", "", "語"],
        "tokenizer.ggml.token_type": [1, 3, -1],
    }
    start = len(SOUND) - 96 - 12
    assert header.tensors == {
        "a": GgufTensor("a", (2, 64), "Q4_0", start, 72),
        "b": GgufTensor("b", (3,), "F32", start + 96, 12),
    }


def test_alignment_and_version_2_are_honoured(tmp_path: Path) -> None:
    keys = [key("general.alignment", U32, 128)]
    content = gguf(keys, [tensor("a", (2,), F32_TENSOR, 0)], bytes(8), version=2, alignment=128)
    header = read_gguf_header(write(tmp_path, content))
    assert (header.version, header.alignment) == (2, 128)
    assert header.tensors["a"].offset == len(content) - 8


def test_nested_arrays_and_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    nested = text("x") + struct.pack("<IIQ", ARRAY, ARRAY, 2) + struct.pack("<IQBB", U8, 2, 1, 2) * 2
    odd = text("y") + struct.pack("<IQ", STRING, 1) + b"\xff"
    assert read_gguf_header(write(tmp_path, gguf([nested, odd], []))).metadata == {"x": [[1, 2], [1, 2]], "y": "\ufffd"}


def test_strings_are_decoded_when_they_are_asked_for(tmp_path: Path) -> None:
    items = ["a", "Ġthe", "", "語"]
    header = read_gguf_header(write(tmp_path, gguf([array("x", STRING, items), array("y", STRING, [])], [])))
    strings, none = header.metadata["x"], header.metadata["y"]
    assert isinstance(strings, GgufStrings)
    assert (list(strings), list(strings), len(strings)) == (items, items, 4)
    assert "語" in strings and "the" not in strings
    assert strings == items and strings != items[:3] and strings != "aĠthe語" and none == []
    assert repr(strings) == "GgufStrings(['a', 'Ġthe', '', '語'])"


def test_strings_that_are_no_utf8_are_replaced(tmp_path: Path) -> None:
    odd = text("x") + struct.pack("<IIQ", ARRAY, STRING, 2) + struct.pack("<Q", 2) + b"\xffa" + text("b")
    assert read_gguf_header(write(tmp_path, gguf([odd], []))).metadata == {"x": ["\ufffda", "b"]}


def test_a_vocabulary_costs_no_more_than_its_bytes_in_the_file(tmp_path: Path) -> None:
    content = gguf([array("x", STRING, [f"token{number}" for number in range(20_000)])], [])
    path = write(tmp_path, content)
    tracemalloc.start()
    try:
        header = read_gguf_header(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(header.metadata["x"]) == 20_000
    assert peak_bytes < len(content) + (64 << 10)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (12, 0), (0, 1 << 26), (0, (1 << 26) + 1), ((1 << 64) - 8, 0)])
def test_strings_that_end_after_the_file_are_refused(lengths: tuple[int, int], tmp_path: Path) -> None:
    """Two lengths in the last 20 bytes of the file: 4 are left for strings."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("x") + struct.pack("<IIQ", ARRAY, STRING, 2)
    with pytest.raises(BrokenFile, match="ends within 'x'"):
        read_gguf_header(write(tmp_path, head + struct.pack("<QQ", *lengths) + bytes(4)))


HUGE = 1 << 62
BROKEN: dict[str, bytes] = {
    "empty": b"",
    "letters GGUF": b"GGML" + SOUND[4:],
    "version": gguf([], [], version=1),
    "tensors, more": SOUND[:8] + struct.pack("<Q", HUGE) + SOUND[16:],
    "metadata keys, more": SOUND[:16] + struct.pack("<Q", HUGE) + SOUND[24:],
    "bytes in a metadata key": gguf([struct.pack("<Q", HUGE) + bytes(16)], []),
    "items in 'x'": gguf([text("x") + struct.pack("<IIQ", ARRAY, U8, HUGE)], [], bytes(64)),
    "ends within 'x'": gguf([text("x") + struct.pack("<IIQ", ARRAY, STRING, 2) + struct.pack("<QQ", HUGE, 0)], []),
    "unknown value type": gguf([text("x") + struct.pack("<I", 13)], [], bytes(64)),
    "too deeply": gguf([text("x") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 6], [], bytes(64)),
    "occurs twice": gguf([key("x", U32, 1)] * 2, []),
    "tensor 'a' occurs twice": gguf([], [TENSORS[0], TENSORS[0]], bytes(200)),
    "alignment 33": gguf([key("general.alignment", U32, 33)], []),
    "alignment 4": gguf([key("general.alignment", U32, 4)], []),
    "0 dimensions": gguf([], [tensor("a", (), F32_TENSOR, 0)], bytes(64)),
    "5 dimensions": gguf([], [tensor("a", (1, 1, 1, 1, 1), F32_TENSOR, 0)], bytes(64)),
    "unknown type 4": gguf([], [tensor("a", (32,), 4, 0)], bytes(64)),
    "Q4_0 cannot store": gguf([], [tensor("a", (33,), Q4_0_TENSOR, 0)], bytes(64)),
    "F32 cannot store": gguf([], [tensor("a", (3, 0), F32_TENSOR, 0)], bytes(64)),
    "not aligned": gguf([], [tensor("a", (3,), F32_TENSOR, 8)], bytes(64)),
    "overlaps": gguf([], [tensor("a", (16,), F32_TENSOR, 0), tensor("b", (4,), F32_TENSOR, 32)], bytes(64)),
    "truncated": SOUND[:-1],
    "'a' ends after the file": gguf([], [tensor("a", (1 << 40, 1 << 40), F32_TENSOR, 0)], bytes(64)),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_each_defect_is_named(reason: str, tmp_path: Path) -> None:
    named = reason.replace("Q4_0 cannot store", "that Q4_0 cannot store").replace("F32 cannot", "that F32 cannot")
    with pytest.raises(BrokenFile, match=named):
        read_gguf_header(write(tmp_path, BROKEN[reason]))


def test_absent_file_and_directory_are_broken_files(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(BrokenFile, match="cannot be read"):
            read_gguf_header(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_headers_are_read_or_refused_without_large_allocations(data: st.DataObject, tmp_path: Path) -> None:
    """Overwrite a few bytes anywhere (often with the bytes of huge lengths), cut, or extend."""
    content = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, b"\x7f" * 4])))
        content[position : position + len(patch)] = patch
    content = content[: data.draw(st.integers(0, len(content) + 1))]
    path = write(tmp_path, bytes(content))
    tracemalloc.start()
    try:
        with suppress(BrokenFile):
            header = read_gguf_header(path)
            assert all(entry.offset + entry.num_bytes <= len(content) for entry in header.tensors.values())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20
