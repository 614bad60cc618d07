"""`FloatMatrix`: matrices of plain floats in the order in which a compiled product reads them.

A weight [N, K] is cut into tiles of 16 outputs; within a tile the 16 weights of an input lie side by side, in the
format in which the checkpoint has them.  Knows no file format; used by `engine.layers.packed_weight`, whose
segments such matrices can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

TILE_OUTPUTS = 16
"""Outputs that lie side by side, in every kind of packed matrix."""


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    """One matrix [out_features, in_features]; `data` is [tiles, in_features, 16] of one of `FLOAT_DTYPES`, contiguous.

    Outputs are padded with zeros.
    """

    out_features: int
    in_features: int
    data: torch.Tensor

    def __post_init__(self) -> None:
        expected = float_shape(self.out_features, self.in_features)
        assert self.data.dtype in FLOAT_DTYPES and self.data.is_contiguous()
        assert tuple(self.data.shape) == expected, f"{tuple(self.data.shape)} is not {expected}"

    def dequantize(self) -> torch.Tensor:
        """The weights, float32 [out_features, in_features]."""
        return self.data.float().transpose(1, 2).flatten(0, 1)[: self.out_features]

    def dequantize_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs, integers [R]: float32 [R, in_features]."""
        return self.data[rows // TILE_OUTPUTS, :, rows % TILE_OUTPUTS].float()


def float_shape(out_features: int, in_features: int) -> tuple[int, int, int]:
    """The shape of a matrix's `data`."""
    return -(-out_features // TILE_OUTPUTS), in_features, TILE_OUTPUTS


def pack_floats(parts: Sequence[torch.Tensor]) -> tuple[FloatMatrix, ...]:
    """The matrices whose outputs are those of `parts`, all [rows, in_features] in `FLOAT_DTYPES`, one after the other.

    Neighbours of equal dtype become one matrix.  Where a part other than the last does not end with a tile,
    everything becomes one matrix, of float32 if the dtypes differ.
    """
    if any(part.shape[0] % TILE_OUTPUTS for part in parts[:-1]):
        dtypes = {part.dtype for part in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        parts = [torch.cat([part.to(dtype) for part in parts])]
    return tuple(_pack(list(run)) for _, run in groupby(parts, key=lambda part: part.dtype))


def _pack(parts: Sequence[torch.Tensor]) -> FloatMatrix:
    """Parts of equal dtype, which all but the last end with a tile."""
    in_features, out_features = parts[0].shape[1], sum(part.shape[0] for part in parts)
    data = parts[0].new_empty(float_shape(out_features, in_features))
    tile = 0
    for part in parts:
        whole, rest = divmod(part.shape[0], TILE_OUTPUTS)
        if whole:
            tiles = part[: whole * TILE_OUTPUTS].unflatten(0, (whole, TILE_OUTPUTS))
            data[tile : tile + whole].copy_(tiles.transpose(1, 2))
            tile += whole
        if rest:
            data[tile].zero_()
            data[tile, :, :rest].copy_(part[whole * TILE_OUTPUTS :].T)
    return FloatMatrix(out_features, in_features, data)
