"""`Checkpoint`: a model on disk as a config and a stream of named tensors, whatever its format.

Config keys and tensor names are those of Hugging Face checkpoints; each format's file
translates.  Knows no model classes.  Used by the loader and by `engine.build`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.api.config import LoadFormat
from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.layers.packed_weight import CodedRows, Coding
from engine.loading.dummy_checkpoint import DummyCheckpoint
from engine.loading.gguf_checkpoint import GgufCheckpoint
from engine.loading.read_plan import StoredTensor
from engine.loading.safetensors_checkpoint import SafetensorsCheckpoint, read_config_json
from store.errors import BrokenFile
from store.formats.part_names import part_paths


class Checkpoint(Protocol):
    """`config` has config.json's keys, `dtype` always among them; `num_bytes` is the size of the tensors on disk."""

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def num_bytes(self) -> int: ...

    def tensor_names(self) -> list[str]:
        """Names of all tensors that `tensors` yields."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor once, in file order, on the CPU; it may share memory with the mapped file, so never write to it.

        Quantised tensors come dequantised, one at a time.
        """
        ...

    def codings(self) -> dict[str, Coding]:
        """The matrices that are stored quantised, with what their codes become."""
        ...

    def float_dtype(self, name: str) -> torch.dtype:
        """The dtype in which `tensors` yields a tensor; float32 if there is none of that name."""
        ...

    def coded_tensors(self) -> Iterator[tuple[str, torch.Tensor | CodedRows]]:
        """As `tensors`, but the matrices that are stored quantised come as rows of codes."""
        ...

    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        ...

    def stored_tensors(self) -> list[StoredTensor] | None:
        """Where the values of `tensors` lie in the files, in file order; None where they must be decoded first."""
        ...


def open_checkpoint(path: Path, load_format: LoadFormat = "auto") -> Checkpoint:
    """Open a checkpoint directory or a GGUF file, reading headers only.

    "dummy" needs a config alone.  Raises `BrokenCheckpoint` or `UnsupportedModel`.
    """
    if not path.exists():
        raise BrokenCheckpoint(f"There is no model at {path}; check the path, or pull the model again.")
    try:
        gguf_file = None if load_format == "safetensors" else _find_gguf(path, load_format)
        if load_format == "dummy":
            config = GgufCheckpoint(gguf_file).config if gguf_file else read_config_json(path)
            return DummyCheckpoint(config)
        return GgufCheckpoint(gguf_file) if gguf_file else SafetensorsCheckpoint(path)
    except BrokenFile as error:
        raise BrokenCheckpoint(error.message) from error


def _find_gguf(path: Path, load_format: LoadFormat) -> Path | None:
    """The GGUF file `path` means; None where it means safetensors."""
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModel(f"{path.name} is not a GGUF file; give a .gguf file or a checkpoint directory.")
        return path
    if load_format != "gguf" and (path / "config.json").exists():
        return None
    files = sorted({part_paths(file)[0] for file in path.glob("*.gguf")})
    if len(files) > 1:
        raise UnsupportedModel(f"{path} holds {len(files)} GGUF models; give the path of one of them.")
    if files:
        return files[0]
    if load_format == "gguf":
        raise UnsupportedModel(f"{path} holds no GGUF file; use the load format auto.")
    return None
