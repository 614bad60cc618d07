"""GGUF models, whole or in several files: memory-mapped, translated to Hugging Face names and layout, tensor by tensor.

Quantised matrices are dequantised, or come as rows of codes.  Opened by `engine.loading.checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.api.architectures import unsupported_types
from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.layers.packed_weight import CodedRows, Coding
from engine.loading.gguf_codes import code_rows, coding_of
from engine.loading.gguf_config import config_from_gguf
from engine.loading.gguf_dequantize import dequantize, dequantized_dtype
from engine.loading.gguf_names import ROPE_FACTORS, hf_name
from engine.loading.mapped_file import MappedFile
from store.formats.gguf import GgufTensor
from store.formats.gguf_parts import read_gguf_model

_LONGEST_ARRAY = 4096
"""Longer ones are vocabularies, which the text stage reads."""
_INTERLEAVED_ARCHITECTURES = frozenset({"llama"})
_QUERY_OR_KEY = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")


class GgufCheckpoint:
    """A GGUF file, or all parts of a model that is split; see `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        """Read the headers.  Raises `BrokenFile`, `BrokenCheckpoint` or `UnsupportedModel`."""
        model = read_gguf_model(path, longest_array=_LONGEST_ARRAY)
        header = model.header
        self._paths = list(model.paths)
        self._files = [MappedFile(part) for part in model.paths]
        if reason := unsupported_types((tensor.type_name for tensor in header.tensors.values()), is_gguf=True):
            raise UnsupportedModel(reason)
        factors = header.tensors.get(ROPE_FACTORS)
        factor_values = tuple(self._read(factors).float().flatten().tolist()) if factors else None
        self.config: dict[str, Any] = config_from_gguf(header, factor_values)
        self._tensors = [tensor for tensor in header.tensors.values() if tensor.name != ROPE_FACTORS]
        self._dtypes = {hf_name(tensor.name): dequantized_dtype(tensor.type_name) for tensor in self._tensors}
        self.num_bytes = sum(tensor.num_bytes for tensor in self._tensors)

    def tensor_names(self) -> list[str]:
        return [hf_name(tensor.name) for tensor in self._tensors]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in self._tensors:
            yield hf_name(tensor.name), self._reorder(tensor, self._read(tensor))

    def codings(self) -> dict[str, Coding]:
        return {hf_name(tensor.name): coding for tensor in self._tensors if (coding := _matrix_coding(tensor))}

    def float_dtype(self, name: str) -> torch.dtype:
        return self._dtypes.get(name, torch.float32)

    def coded_tensors(self) -> Iterator[tuple[str, torch.Tensor | CodedRows]]:
        for tensor in self._tensors:
            if _matrix_coding(tensor) is None:
                yield hf_name(tensor.name), self._reorder(tensor, self._read(tensor))
            else:
                rows = code_rows(tensor.name, self._bytes(tensor), tensor.type_name, (tensor.shape[0], tensor.shape[1]))
                yield hf_name(tensor.name), rows.with_rows(partial(self._reorder, tensor))
            self._files[tensor.part].release(tensor.offset, tensor.num_bytes)

    def files(self) -> list[Path]:
        return self._paths

    def stored_tensors(self) -> None:
        return None

    def _bytes(self, tensor: GgufTensor) -> torch.Tensor:
        return self._files[tensor.part].view(tensor.offset, tensor.num_bytes)

    def _read(self, tensor: GgufTensor) -> torch.Tensor:
        return dequantize(self._bytes(tensor), tensor.type_name, tensor.shape)

    def _reorder(self, tensor: GgufTensor, values: torch.Tensor) -> torch.Tensor:
        """`values` of `tensor`, whose first dimension is its rows, in the row order of Hugging Face checkpoints."""
        if self.config["model_type"] not in _INTERLEAVED_ARCHITECTURES or not _QUERY_OR_KEY.fullmatch(tensor.name):
            return values
        return _split_rotary_halves(tensor.name, values, self.config["head_dim"])


def _matrix_coding(tensor: GgufTensor) -> Coding | None:
    return coding_of(tensor.type_name) if len(tensor.shape) == 2 else None


def _split_rotary_halves(name: str, values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo the row order of llama.cpp's Llama files, which put the two rows of a rotated pair side by side.

    Within each head of `head_dim` rows, (pair, half) becomes (half, pair), as in Hugging Face checkpoints.
    """
    if head_dim % 2 or values.shape[0] % head_dim:
        raise BrokenCheckpoint(f"The tensor {name!r} is not made of heads of {head_dim}; pull the model again.")
    paired = values.view(-1, head_dim // 2, 2, *values.shape[1:])
    return paired.transpose(1, 2).reshape(values.shape)
