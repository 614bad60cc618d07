"""Read the header of a GGUF file: metadata and the table of tensors, never their data.

Standard library only.  Every length in the file is checked against the bytes that are left
before anything is allocated for it, so a truncated or hostile file costs one `BrokenFile` and
no memory.  Vocabularies are found but not decoded: only the tokenizer needs their strings.
Used by `store` for facts, by `engine.text` for the tokenizer and by
`engine.loading` for the weights; what a key or a tensor means is theirs to know.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from store.errors import BrokenFile

GGUF_MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Far above any real file (vocabularies reach 300k entries, models some thousands of tensors).
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 18
_MAX_ARRAY_ITEMS = 1 << 22
_MAX_STRING_BYTES = 1 << 26
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 4

_STRING = 8
_ARRAY = 9
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING_LENGTH = struct.Struct("<Q")
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

# Id in the file -> name, elements per block, bytes per block (ggml's own table).
_TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

GGUF_BLOCK_SIZES: dict[str, tuple[int, int]] = {
    name: (elements, num_bytes) for name, elements, num_bytes in _TENSOR_TYPES.values()
}
"""Tensor type -> (elements per block, bytes per block)."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table; `shape` is row-major (torch order), `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


class GgufStrings(Collection[str]):
    """A string array, kept as the bytes that it takes in the file and decoded anew by each iteration.

    A vocabulary takes a tenth of the memory and time that its strings would.  What is not UTF-8 becomes U+FFFD.
    Equal to a list of the same strings.
    """

    __slots__ = ("_count", "_encoded")

    def __init__(self, encoded: bytes, count: int) -> None:
        """`encoded` is `count` times a length and as many bytes, which the caller has checked."""
        self._encoded = encoded
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        encoded, read_length = self._encoded, _STRING_LENGTH.unpack_from
        end = 0
        for _ in repeat(None, self._count):
            start = end + 8
            end = start + read_length(encoded, end)[0]
            yield encoded[start:end].decode("utf-8", "replace")

    def __contains__(self, item: object) -> bool:
        return any(string == item for string in self)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, GgufStrings | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"GgufStrings({list(self)!r})"


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All of a GGUF file but its tensor data.

    Metadata values are Python scalars and strings; arrays are lists, those of strings `GgufStrings`.
    """

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    alignment: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse the header of `path` and check the tensor table against the size of the file.

    Raises `BrokenFile` for anything but a whole GGUF file of a supported version.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise _broken(path.name, "it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _read_header(_Reader(view, path.name))
    except OSError as error:
        raise BrokenFile(
            f"{path.name} cannot be read ({error.strerror or error}); check the file, or pull the model again."
        ) from error


def _broken(file_name: str, reason: str) -> BrokenFile:
    return BrokenFile(f"{file_name} is not a sound GGUF file: {reason}; remove it and pull the model again.")


class _Reader:
    """A position in the mapped file; every read checks what is left first."""

    def __init__(self, view: mmap.mmap, file_name: str) -> None:
        self.view = view
        self.size = len(view)
        self.position = 0
        self.file_name = file_name
        self.num_array_items = 0

    def broken(self, reason: str) -> BrokenFile:
        return _broken(self.file_name, reason)

    def require(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.position:
            raise self.broken(f"it ends within {what}")

    def unpack(self, format_: str, count: int, what: str) -> tuple[Any, ...]:
        """`count` little-endian values of one struct format character."""
        self.require(struct.calcsize(f"<{format_}") * count, what)
        layout = struct.Struct(f"<{count}{format_}")
        values = layout.unpack_from(self.view, self.position)
        self.position += layout.size
        return values

    def scalar(self, format_: str, what: str) -> Any:
        return self.unpack(format_, 1, what)[0]

    def count(self, limit: int, min_item_bytes: int, what: str) -> int:
        """A 64-bit count of items that each take at least `min_item_bytes` of the rest of the file."""
        count: int = self.scalar("Q", what)
        if count > limit or count * min_item_bytes > self.size - self.position:
            raise self.broken(f"it claims {count:,} {what}, more than it can hold")
        return count

    def identifier(self, what: str) -> str:
        try:
            return self.bytes(what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(f"{what} is not UTF-8") from error

    def bytes(self, what: str) -> bytes:
        length = self.count(_MAX_STRING_BYTES, 1, f"bytes in {what}")
        self.position += length
        return self.view[self.position - length : self.position]


def _read_header(reader: _Reader) -> GgufHeader:
    if reader.view[:4] != GGUF_MAGIC:
        raise reader.broken("it does not begin with the letters GGUF")
    reader.position = 4
    version = reader.scalar("I", "the version")
    if version not in SUPPORTED_VERSIONS:
        raise reader.broken(f"its version {version} is not one of {SUPPORTED_VERSIONS}")
    num_tensors = reader.count(_MAX_TENSORS, _MIN_TENSOR_BYTES, "tensors")
    num_keys = reader.count(_MAX_KEYS, _MIN_KEY_BYTES, "metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.identifier("a metadata key")
        if key in metadata:
            raise reader.broken(f"the metadata key {key!r} occurs twice")
        metadata[key] = _read_value(reader, reader.scalar("I", "a value type"), key)
    alignment = _alignment(reader, metadata)
    rows = [_read_tensor_row(reader) for _ in range(num_tensors)]
    data_start = reader.position + -reader.position % alignment
    return GgufHeader(version, metadata, _check_tensors(reader, rows, data_start, alignment), alignment)


def _alignment(reader: _Reader, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.broken(f"its alignment {alignment!r} is not a power of two from 8 on")
    return alignment


def _read_value(reader: _Reader, type_id: int, key: str, depth: int = 0) -> Any:
    if type_id in _SCALAR_FORMATS:
        return reader.scalar(_SCALAR_FORMATS[type_id], key)
    if type_id == _STRING:
        return reader.bytes(key).decode("utf-8", "replace")
    if type_id != _ARRAY:
        raise reader.broken(f"{key!r} has the unknown value type {type_id}")
    if depth == _MAX_ARRAY_DEPTH:
        raise reader.broken(f"{key!r} nests arrays too deeply")
    item_type = reader.scalar("I", key)
    format_ = _SCALAR_FORMATS.get(item_type)
    min_item_bytes = struct.calcsize(f"<{format_}") if format_ else 8
    count = reader.count(_MAX_ARRAY_ITEMS - reader.num_array_items, min_item_bytes, f"items in {key!r}")
    reader.num_array_items += count
    if format_:
        return list(reader.unpack(format_, count, key))
    if item_type == _STRING:
        return _read_strings(reader, count, key)
    return [_read_value(reader, item_type, key, depth + 1) for _ in range(count)]


def _read_strings(reader: _Reader, count: int, key: str) -> GgufStrings:
    """Check a string array without a method call per entry: vocabularies hold 50k to 300k of them."""
    view, start = reader.view, reader.position
    position, read_length = start, _STRING_LENGTH.unpack_from
    try:
        for _ in repeat(None, count):
            (length,) = read_length(view, position)
            if length > _MAX_STRING_BYTES:
                raise reader.broken(f"it ends within {key!r}")
            position += 8 + length
    except struct.error as error:  # no whole length is left, or the string before ends after the file
        raise reader.broken(f"it ends within {key!r}") from error
    reader.require(position - start, repr(key))
    reader.position = position
    return GgufStrings(view[start:position], count)


def _read_tensor_row(reader: _Reader) -> GgufTensor:
    """One row of the table, its offset still relative to the start of the data."""
    name = reader.identifier("a tensor name")
    num_dimensions = reader.scalar("I", name)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise reader.broken(f"tensor {name!r} has {num_dimensions} dimensions")
    dimensions = reader.unpack("Q", num_dimensions, name)
    type_id = reader.scalar("I", name)
    if type_id not in _TENSOR_TYPES:
        raise reader.broken(f"tensor {name!r} has the unknown type {type_id}")
    type_name, block_elements, block_bytes = _TENSOR_TYPES[type_id]
    if 0 in dimensions or dimensions[0] % block_elements:
        raise reader.broken(f"tensor {name!r} has a shape that {type_name} cannot store")
    num_bytes = math.prod(dimensions) // block_elements * block_bytes
    return GgufTensor(name, tuple(reversed(dimensions)), type_name, reader.scalar("Q", name), num_bytes)


def _check_tensors(reader: _Reader, rows: list[GgufTensor], data_start: int, alignment: int) -> dict[str, GgufTensor]:
    """Make offsets absolute; refuse tensors that are misaligned, overlap, repeat, or end after the file."""
    tensors: dict[str, GgufTensor] = {}
    for row in rows:
        if row.name in tensors:
            raise reader.broken(f"tensor {row.name!r} occurs twice")
        if row.offset % alignment:
            raise reader.broken(f"tensor {row.name!r} is not aligned to {alignment} bytes")
        offset = data_start + row.offset
        if offset + row.num_bytes > reader.size:
            raise reader.broken(f"tensor {row.name!r} ends after the file, which is truncated")
        tensors[row.name] = GgufTensor(row.name, row.shape, row.type_name, offset, row.num_bytes)
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise reader.broken(f"tensor {tensor.name!r} overlaps another")
        end = tensor.offset + tensor.num_bytes
    return tensors
