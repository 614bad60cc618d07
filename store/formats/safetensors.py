"""Read the header of a safetensors file: names, dtypes, shapes and offsets, never tensor data.

Standard library only.  The header is refused unless its tensors tile the rest of the file
exactly, as the format demands.  Used by `store` for facts and by `engine.loading` for weights;
sharded checkpoints are theirs to put together.

Layout: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from store.errors import BrokenFile

# The format's own limit.
_MAX_HEADER_BYTES = 100_000_000
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
    """Tensors of `path` by name, in file order.  Raises `BrokenFile` for anything but a whole file."""
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
                raise _broken(path, "its header is longer than the file can hold")
            header = file.read(header_bytes)
    except OSError as error:
        raise BrokenFile(
            f"{path.name} cannot be read ({error.strerror or error}); check the file, or pull the model again."
        ) from error
    entries = _parse(path, header)
    data_start = 8 + header_bytes
    tensors = [_read_entry(path, name, entry, data_start) for name, entry in entries.items() if name != _METADATA_KEY]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            raise _broken(path, f"tensor {tensor.name!r} overlaps another or leaves a gap")
        end = tensor.offset + tensor.num_bytes
    if end != file_bytes:
        raise _broken(path, f"its tensors end at byte {end:,} but the file has {file_bytes:,}")
    return {tensor.name: tensor for tensor in tensors}


def _broken(path: Path, reason: str) -> BrokenFile:
    return BrokenFile(f"{path.name} is not a sound safetensors file: {reason}; remove it and pull the model again.")


def _parse(path: Path, header: bytes) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise ValueError("a name occurs twice")
        return entries

    try:
        entries = json.loads(header, object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise _broken(path, "its header is not valid JSON") from error
    if not isinstance(entries, dict):
        raise _broken(path, "its header is not a JSON object")
    return entries


def _read_entry(path: Path, name: str, entry: Any, data_start: int) -> SafetensorsTensor:
    if not isinstance(entry, dict):
        raise _broken(path, f"the entry of tensor {name!r} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise _broken(path, f"tensor {name!r} has no known dtype")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _broken(path, f"tensor {name!r} has no valid shape and offsets")
    begin, end = offsets
    num_bits = math.prod(shape) * _DTYPE_BITS[dtype]
    if num_bits % 8 or end - begin != num_bits // 8:
        raise _broken(path, f"the bytes of tensor {name!r} do not match its shape")
    return SafetensorsTensor(name, dtype, tuple(shape), data_start + begin, end - begin)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
