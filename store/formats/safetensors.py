"""Read the header of a safetensors file: names, dtypes, shapes and offsets, never tensor data.

Standard library only.  The header is refused unless its tensors tile the rest of the file
exactly, as the format demands.  Used by `store` for facts and by `engine.loading` for weights;
sharded checkpoints are theirs to put together.

Layout: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from store.errors import BrokenFile
from store.formats import limits
from store.formats.byte_source import ByteSource, open_local
from store.formats.json_object import NotAnObject, parse_json_object

_METADATA_KEY = "__metadata__"

_DTYPE_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """One tensor of the file; `offset` counts from the start of the file, `dtype` is the format's name ("BF16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_safetensors_header(path: Path) -> dict[str, SafetensorsTensor]:
    """The tensors of the file at `path`, as `parse_safetensors_header` gives them."""
    with open_local(path) as source:
        return parse_safetensors_header(source)


def parse_safetensors_header(source: ByteSource) -> dict[str, SafetensorsTensor]:
    """Tensors by name, in file order.  Raises `BrokenFile` for anything but a whole file."""
    first = source.fetch(0, 8)
    data_start = 8 + int.from_bytes(first[:8], "little")
    if len(first) < 8 or data_start > min(source.size_bytes or limits.MAX_SIZE, limits.MAX_HEADER_BYTES):
        raise _broken(source, "its header is longer than the file can hold")
    header = first[8:data_start]
    if len(first) < data_start:
        header += source.fetch(len(first), data_start - len(first))[: data_start - len(first)]
    if len(header) != data_start - 8:
        raise _broken(source, "it ends within its header")
    try:
        entries = parse_json_object(header, unique_names=True)
    except NotAnObject as error:
        raise _broken(source, f"its header {error}") from error
    tensors = [_read_entry(source, name, entry, data_start) for name, entry in entries.items() if name != _METADATA_KEY]
    if len(tensors) > limits.MAX_TENSORS:
        raise _broken(source, f"it claims {len(tensors):,} tensors, more than any model has")
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _require_tiled(source, tensors, data_start)
    return {tensor.name: tensor for tensor in tensors}


def _require_tiled(source: ByteSource, tensors: list[SafetensorsTensor], data_start: int) -> None:
    """The tensors, by offset, must lie side by side up to the end of the file."""
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            raise _broken(source, f"tensor {tensor.name!r} overlaps another or leaves a gap")
        end = tensor.offset + tensor.num_bytes
    if source.size_bytes is not None and end != source.size_bytes:
        raise _broken(source, f"its tensors end at byte {end:,} but the file has {source.size_bytes:,}")


def _broken(source: ByteSource, reason: str) -> BrokenFile:
    return BrokenFile(f"{source.name} is not a sound safetensors file: {reason}; {source.remedy}.")


def _read_entry(source: ByteSource, name: str, entry: Any, data_start: int) -> SafetensorsTensor:
    if not limits.is_safe_name(name):
        raise _broken(source, f"a tensor is named {name[:60]!a}, as none can be")
    if not isinstance(entry, dict):
        raise _broken(source, f"the entry of tensor {name!r} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise _broken(source, f"tensor {name!r} has no known dtype")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _broken(source, f"tensor {name!r} has no valid shape and offsets")
    begin, end = offsets
    num_bits = math.prod(shape) * _DTYPE_BITS[dtype]
    if num_bits % 8 or end - begin != num_bits // 8:
        raise _broken(source, f"the bytes of tensor {name!r} do not match its shape")
    return SafetensorsTensor(name, dtype, tuple(shape), data_start + begin, end - begin)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= limits.MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size <= limits.MAX_SIZE for size in value)
    )
