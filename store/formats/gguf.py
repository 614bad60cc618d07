"""Read the header of a GGUF file: metadata and the table of tensors, never their data.

Standard library only.  Every length in the file is checked against the bytes that are left
before anything is allocated for it, so a truncated or hostile file costs one `BrokenFile` and
no memory.  Vocabularies are found but not decoded: only the tokenizer needs their strings.
Used by `store` for facts, by `engine.text` for the tokenizer and by
`engine.loading` for the weights; what a key or a tensor means is theirs to know.  Models that are split
into several files are put together by `store.formats.gguf_parts`.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store.errors import BrokenFile
from store.formats import limits
from store.formats.byte_source import ByteSource, open_local
from store.formats.gguf_strings import STRING_LENGTH, GgufStrings
from store.formats.gguf_types import GGUF_TENSOR_TYPES

GGUF_MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4

_STRING = 8
_ARRAY = 9
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table; `shape` is row-major (torch order), `offset` counts from the start of its file.

    `part` says which file that is, where a model is split into several.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All of a GGUF file but its tensor data.

    Metadata values are Python scalars and strings; arrays are lists, those of strings `GgufStrings`.
    """

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    alignment: int


def read_gguf_header(path: Path, *, longest_array: int = limits.MAX_ARRAY_ITEMS) -> GgufHeader:
    """The header of the file at `path`, as `parse_gguf_header` gives it."""
    with open_local(path) as source:
        return parse_gguf_header(source, longest_array=longest_array)


def parse_gguf_header(source: ByteSource, *, longest_array: int = limits.MAX_ARRAY_ITEMS) -> GgufHeader:
    """Parse the header and check the tensor table against the size of the file.

    Arrays of more than `longest_array` items are passed over and not part of the metadata: facts need no
    vocabulary.  Raises `BrokenFile` for anything but a whole GGUF file of a supported version.
    """
    reader = _Reader(source, longest_array)
    if reader.size == 0:
        raise reader.broken("it is empty")
    if not reader.window(4, "its first letters")[0].startswith(GGUF_MAGIC):
        raise reader.broken("it does not begin with the letters GGUF")
    reader.position = 4
    return _read_header(reader)


class _Reader:
    """A position in the file and the bytes around it; every read checks what is left first."""

    def __init__(self, source: ByteSource, longest_array: int) -> None:
        self.source = source
        self.size = limits.MAX_SIZE if source.size_bytes is None else source.size_bytes
        self.longest_array = longest_array
        self.position = 0
        self.num_array_items = 0
        self._window = b""
        self._window_start = 0

    def broken(self, reason: str) -> BrokenFile:
        return BrokenFile(f"{self.source.name} is not a sound GGUF file: {reason}; {self.source.remedy}.")

    def window(self, num_bytes: int, what: str) -> tuple[bytes, int]:
        """Bytes of the file and the index of the position in them, from which `num_bytes` are there."""
        start = self.position - self._window_start
        if not 0 <= start <= len(self._window) - num_bytes:
            self._require(num_bytes, what)
            self._window = b""
            self._window = self.source.fetch(self.position, num_bytes)
            self._window_start, start = self.position, 0
            if len(self._window) < num_bytes:
                raise self.broken(f"it ends within {what}")
        return self._window, start

    def skip(self, num_bytes: int, what: str) -> None:
        self._require(num_bytes, what)
        self.position += num_bytes

    def unpack(self, format_: str, count: int, what: str) -> tuple[Any, ...]:
        """`count` little-endian values of one struct format character."""
        layout = struct.Struct(f"<{count}{format_}")
        window, start = self.window(layout.size, what)
        self.position += layout.size
        return layout.unpack_from(window, start)

    def scalar(self, format_: str, what: str) -> Any:
        return self.unpack(format_, 1, what)[0]

    def count(self, limit: int, min_item_bytes: int, what: str) -> int:
        """A 64-bit count of items that each take at least `min_item_bytes` of the rest of the file."""
        count: int = self.scalar("Q", what)
        if count > limit or count * min_item_bytes > self.size - self.position:
            raise self.broken(f"it claims {count:,} {what}, more than it can hold")
        return count

    def name(self, what: str) -> str:
        """The identifier of a key or a tensor."""
        try:
            name = self.bytes(what, limits.MAX_NAME_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(f"{what} is not UTF-8") from error
        if not limits.is_safe_name(name):
            raise self.broken(f"{what} is named {name[:60]!a}, as none can be")
        return name

    def bytes(self, what: str, limit: int = limits.MAX_STRING_BYTES) -> bytes:
        length = self.count(limit, 1, f"bytes in {what}")
        window, start = self.window(length, what)
        self.position += length
        return window[start : start + length]

    def _require(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.position:
            raise self.broken(f"it ends within {what}")
        if self.position + num_bytes > limits.MAX_HEADER_BYTES:
            raise self.broken(f"its header is longer than {limits.MAX_HEADER_BYTES >> 20} MiB")


def _read_header(reader: _Reader) -> GgufHeader:
    """What follows the magic letters."""
    version = reader.scalar("I", "the version")
    if version not in SUPPORTED_VERSIONS:
        raise reader.broken(f"its version {version} is not one of {SUPPORTED_VERSIONS}")
    num_tensors = reader.count(limits.MAX_TENSORS, _MIN_TENSOR_BYTES, "tensors")
    num_keys = reader.count(limits.MAX_KEYS, _MIN_KEY_BYTES, "metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.name("a metadata key")
        if key in metadata:
            raise reader.broken(f"the metadata key {key!r} occurs twice")
        metadata[key] = _read_value(reader, reader.scalar("I", "a value type"), key)
    alignment = _alignment(reader, metadata)
    rows = [_read_tensor_row(reader) for _ in range(num_tensors)]
    data_start = reader.position + -reader.position % alignment
    tensors = _check_tensors(reader, rows, data_start, alignment)
    kept = {key: value for key, value in metadata.items() if value is not None}
    return GgufHeader(version, kept, tensors, alignment)


def _alignment(reader: _Reader, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.broken(f"its alignment {alignment!r} is not a power of two from 8 on")
    return alignment


def _read_value(reader: _Reader, type_id: int, key: str, depth: int = 0) -> Any:
    """A value of the metadata; None for an array that is passed over."""
    if type_id in _SCALAR_FORMATS:
        return reader.scalar(_SCALAR_FORMATS[type_id], key)
    if type_id == _STRING:
        return reader.bytes(key).decode("utf-8", "replace")
    if type_id != _ARRAY:
        raise reader.broken(f"{key!r} has the unknown value type {type_id}")
    if depth == limits.MAX_ARRAY_DEPTH:
        raise reader.broken(f"{key!r} nests arrays too deeply")
    item_type = reader.scalar("I", key)
    format_ = _SCALAR_FORMATS.get(item_type)
    item_bytes = struct.calcsize(f"<{format_}") if format_ else STRING_LENGTH.size
    limit = limits.MAX_NESTED_ARRAYS if item_type == _ARRAY else limits.MAX_ARRAY_ITEMS - reader.num_array_items
    count = reader.count(limit, item_bytes, f"items in {key!r}")
    reader.num_array_items += count
    is_kept = count <= reader.longest_array
    if format_:
        return list(reader.unpack(format_, count, key)) if is_kept else reader.skip(count * item_bytes, key)
    if item_type == _STRING:
        strings = GgufStrings(_read_strings(reader, count, key, is_kept=is_kept))
        return strings if is_kept else None
    return [_read_value(reader, item_type, key, depth + 1) for _ in range(count)]


def _read_strings(reader: _Reader, count: int, key: str, *, is_kept: bool) -> tuple[tuple[bytes, int], ...]:
    """Check a string array window by window; vocabularies hold 50k to 300k entries."""
    chunks: list[tuple[bytes, int]] = []
    what = repr(key)
    while count:
        window, start = reader.window(STRING_LENGTH.size, what)
        num_strings, end = _whole_strings(window, start, count)
        if num_strings:
            reader.position += end - start
            count -= num_strings
            if is_kept:
                chunks.append((window[start:end], num_strings))
            continue
        (length,) = STRING_LENGTH.unpack_from(window, start)
        if length > limits.MAX_STRING_BYTES:
            raise reader.broken(f"it ends within {what}")
        reader.window(STRING_LENGTH.size + length, what)
    return tuple(chunks)


def _whole_strings(window: bytes, start: int, count: int) -> tuple[int, int]:
    """How many strings, up to `count`, lie wholly in the window from `start` on, and where they end.

    Without a method call per entry: vocabularies are long.
    """
    read_length, last, end, number = STRING_LENGTH.unpack_from, len(window), start, 0
    try:
        for number in range(count):
            following = end + 8 + read_length(window, end)[0]
            if following > last:
                return number, end
            end = following
    except struct.error:  # no whole length is left
        return number, end
    return count, end


def _read_tensor_row(reader: _Reader) -> GgufTensor:
    """One row of the table, its offset still relative to the start of the data."""
    name = reader.name("a tensor")
    num_dimensions = reader.scalar("I", name)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise reader.broken(f"tensor {name!r} has {num_dimensions} dimensions")
    dimensions = reader.unpack("Q", num_dimensions, name)
    type_id = reader.scalar("I", name)
    if type_id not in GGUF_TENSOR_TYPES:
        raise reader.broken(f"tensor {name!r} has the unknown type {type_id}")
    type_name, block_elements, block_bytes = GGUF_TENSOR_TYPES[type_id]
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
