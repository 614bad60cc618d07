"""GGUF models that are split into several files, put together as if they were one.

llama.cpp's splitter writes `NAME-00001-of-00003.gguf` and so on: the first part has all metadata, each has the
table of its own tensors.  Nothing here knows what a key or a tensor means.  Called by `store.facts`,
`engine.loading` and where the files of a model are listed.

Keys: https://github.com/ggml-org/llama.cpp/blob/master/tools/gguf-split/README.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from store.errors import BrokenFile
from store.formats import limits
from store.formats.gguf import GgufHeader, GgufTensor, read_gguf_header
from store.formats.part_names import part_paths


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The header of a whole model; `tensor.part` is an index into `paths`."""

    header: GgufHeader
    paths: tuple[Path, ...]


def read_gguf_model(path: Path, *, longest_array: int = limits.MAX_ARRAY_ITEMS) -> GgufModel:
    """The model in the file at `path` and, if that is one of several parts, in those beside it.

    Arguments and errors as `read_gguf_header`; a part that is missing is a `BrokenFile` too.
    """
    paths = tuple(part_paths(path))
    header = read_gguf_header(paths[0], longest_array=longest_array)
    others = (read_gguf_header(part, longest_array=0) for part in paths[1:])
    return GgufModel(join_gguf_parts([part.name for part in paths], [header, *others]), paths)


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """The metadata of the model that the file at `path` is, or is a part of; errors as `read_gguf_header`."""
    return read_gguf_header(part_paths(path)[0]).metadata


def join_gguf_parts(names: Sequence[str], headers: Sequence[GgufHeader]) -> GgufHeader:
    """One header of those of all parts.  Raises `BrokenFile` unless they belong together and are complete."""
    first = headers[0]
    tensors: dict[str, GgufTensor] = {}
    for index, (name, header) in enumerate(zip(names, headers, strict=True)):
        count, number = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        if (count or 1) != len(headers) or number != index:
            raise BrokenFile(
                f"{name} says that it is part {_shown(number, 1)} of {_shown(count)}, and its name says part "
                f"{index + 1} of {len(headers)}; give the files the names that they were published under."
            )
        if twice := tensors.keys() & header.tensors.keys():
            raise BrokenFile(f"The tensor {min(twice)!r} is in two parts, the later {name}; pull the model again.")
        tensors |= {key: replace(tensor, part=index) for key, tensor in header.tensors.items()}
    promised = first.metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise BrokenFile(
            f"{names[0]} promises {_shown(promised)} tensors but its parts hold {len(tensors):,}; pull the model again."
        )
    return replace(first, tensors=tensors)


def _shown(value: object, offset: int = 0) -> str:
    return f"{value + offset:,}" if type(value) is int else "an unknown number"
