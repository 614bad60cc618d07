"""GGUF files: memory-mapped, translated to Hugging Face names and layout, dequantised tensor by tensor.

Opened by `engine.loading.checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.loading.gguf_config import config_from_gguf
from engine.loading.gguf_dequantize import SUPPORTED_TYPES, dequantize
from engine.loading.gguf_names import ROPE_FACTORS, hf_name
from engine.loading.mapped_file import MappedFile
from store.formats.gguf import GgufTensor, read_gguf_header

_INTERLEAVED_ARCHITECTURES = frozenset({"llama"})
_QUERY_OR_KEY = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")


class GgufCheckpoint:
    """One GGUF file; see `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        """Read the header.  Raises `BrokenFile`, `BrokenCheckpoint` or `UnsupportedModel`."""
        header = read_gguf_header(path)
        self._file = MappedFile(path)
        for tensor in header.tensors.values():
            if tensor.type_name not in SUPPORTED_TYPES:
                raise UnsupportedModel(
                    f"The tensor {tensor.name!r} is stored as {tensor.type_name}; choose a file quantised as one of: "
                    f"{', '.join(SUPPORTED_TYPES)}."
                )
        factors = header.tensors.get(ROPE_FACTORS)
        factor_values = tuple(self._read(factors).float().flatten().tolist()) if factors else None
        self.config: dict[str, Any] = config_from_gguf(header, factor_values)
        self._tensors = [tensor for tensor in header.tensors.values() if tensor.name != ROPE_FACTORS]
        self.num_bytes = sum(tensor.num_bytes for tensor in self._tensors)

    def tensor_names(self) -> list[str]:
        return [hf_name(tensor.name) for tensor in self._tensors]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        interleaved = self.config["model_type"] in _INTERLEAVED_ARCHITECTURES
        for tensor in self._tensors:
            values = self._read(tensor)
            if interleaved and _QUERY_OR_KEY.fullmatch(tensor.name):
                values = _split_rotary_halves(tensor.name, values, self.config["head_dim"])
            yield hf_name(tensor.name), values

    def stored_tensors(self) -> None:
        return None

    def _read(self, tensor: GgufTensor) -> torch.Tensor:
        return dequantize(self._file.view(tensor.offset, tensor.num_bytes), tensor.type_name, tensor.shape)


def _split_rotary_halves(name: str, values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo the row order of llama.cpp's Llama files, which put the two rows of a rotated pair side by side.

    Within each head of `head_dim` rows, (pair, half) becomes (half, pair), as in Hugging Face checkpoints.
    """
    if head_dim % 2 or values.shape[0] % head_dim:
        raise BrokenCheckpoint(f"The tensor {name!r} is not made of heads of {head_dim}; pull the model again.")
    paired = values.view(-1, head_dim // 2, 2, *values.shape[1:])
    return paired.transpose(1, 2).reshape(values.shape)
