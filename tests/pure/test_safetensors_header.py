"""The safetensors header reader: right on sound files, and `BrokenFile` on all others."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.errors import BrokenFile
from store.formats.safetensors import SafetensorsTensor, read_safetensors_header

ENTRIES: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
    "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    "empty": {"dtype": "I64", "shape": [0, 7], "data_offsets": [16, 16]},
}


def safetensors(entries: Any, num_data_bytes: int = 16) -> bytes:
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(num_data_bytes)


def write(directory: Path, content: bytes) -> Path:
    path = directory / "model.safetensors"
    path.write_bytes(content)
    return path


def test_sound_file_is_read_in_file_order(tmp_path: Path) -> None:
    content = safetensors(ENTRIES)
    start = len(content) - 16
    tensors = read_safetensors_header(write(tmp_path, content))
    assert list(tensors.values()) == [
        SafetensorsTensor("a", "F32", (), start, 4),
        SafetensorsTensor("b", "BF16", (2, 3), start + 4, 12),
        SafetensorsTensor("empty", "I64", (0, 7), start + 16, 0),
    ]


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


DUPLICATE = json.dumps(entry()).encode()[:-1] + b", " + json.dumps(entry()).encode()[1:]
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "longer than the file"),
    "short": (b"\x01\x00", "longer than the file"),
    "huge header": (struct.pack("<Q", 1 << 60) + bytes(100), "longer than the file"),
    "no json": (safetensors(b"{nope"), "not valid JSON"),
    "no utf-8": (safetensors(b"\xff\xfe\xfd\xfc"), "not valid JSON"),
    "deep json": (safetensors(b"[" * 200_000), "not valid JSON"),
    "twice": (safetensors(DUPLICATE), "not valid JSON"),
    "list": (safetensors([]), "not a JSON object"),
    "entry": (safetensors({"a": 7}), "not an object"),
    "dtype": (safetensors(entry(dtype="F31")), "no known dtype"),
    "dtype type": (safetensors(entry(dtype=[])), "no known dtype"),
    "shape": (safetensors(entry(shape=[-4])), "no valid shape"),
    "shape bool": (safetensors(entry(shape=[True])), "no valid shape"),
    "offsets": (safetensors(entry(data_offsets=[0])), "no valid shape"),
    "bytes": (safetensors(entry(shape=[5])), "do not match its shape"),
    "backwards": (safetensors(entry(data_offsets=[16, 0])), "do not match its shape"),
    "half byte": (safetensors(entry(dtype="F4", shape=[33])), "do not match its shape"),
    "gap": (safetensors(entry(data_offsets=[4, 20]), 20), "leaves a gap"),
    "overlap": (safetensors({**entry(), "b": entry()["a"]}), "overlaps"),
    "truncated": (safetensors(entry())[:-1], "tensors end at byte"),
    "trailing": (safetensors(entry(), 17), "tensors end at byte"),
}


@pytest.mark.parametrize("defect", BROKEN)
def test_each_defect_is_named(defect: str, tmp_path: Path) -> None:
    content, reason = BROKEN[defect]
    with pytest.raises(BrokenFile, match=reason):
        read_safetensors_header(write(tmp_path, content))


def test_absent_file_is_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match="cannot be read"):
        read_safetensors_header(tmp_path / "absent.safetensors")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_files_are_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    content = bytearray(safetensors(ENTRIES))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        alphabet = st.sampled_from([b"9", b"-", b'"', b"[", b"}", b"1e999", b"null", b"\xff", b"\x00"])
        patch = data.draw(alphabet)
        content[position : position + data.draw(st.integers(0, len(patch)))] = patch
    path = write(tmp_path, bytes(content[: data.draw(st.integers(0, len(content)))]))
    with suppress(BrokenFile):
        tensors = read_safetensors_header(path)
        assert all(tensor.offset + tensor.num_bytes <= len(content) for tensor in tensors.values())
