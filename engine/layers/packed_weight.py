"""`PackedWeight`: quantised matrices in the order in which a compiled product reads them.

A weight [N, K] is cut into tiles of 16 outputs and groups of 32 inputs; a weight is scale · code + minimum,
with unsigned codes of 4 or 8 bits, and a float16 scale and minimum for each output and group.  Each tile
and group is one record: the codes, 16 scales, 16 minimums.  Input 4 j + i of a group and output lane o lie

- with 8 bits at byte 64 j + 4 o + i (a record has 576 bytes);
- with 4 bits at byte 64 (j mod 4) + 4 o + i, in the low half if j < 4, else in the high one (320 bytes).

So four inputs of sixteen outputs are one 64-byte vector, as dot product instructions take it.  Outputs and
inputs are padded with zeros.  Knows no file format; filled by `engine.layers.packed_linear`, multiplied by
`engine.cpu`, and dequantised by `engine.kernels.torch_ops`, the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Bits = Literal[4, 8]

TILE_OUTPUTS = 16
GROUP_INPUTS = 32
_QUAD_INPUTS = 4
_QUADS = GROUP_INPUTS // _QUAD_INPUTS
_NUMBERS_BYTES = 2 * 2 * TILE_OUTPUTS


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix [out_features, in_features]; `data` is uint8 [tiles, groups, record bytes], contiguous.

    `data` may be a read-only memory map: it is never written to.
    """

    bits: Bits
    out_features: int
    in_features: int
    data: torch.Tensor

    def __post_init__(self) -> None:
        expected = packed_shape(self.bits, self.out_features, self.in_features)
        assert self.data.dtype == torch.uint8 and self.data.is_contiguous()
        assert tuple(self.data.shape) == expected, f"{tuple(self.data.shape)} is not {expected}"

    def dequantize(self) -> torch.Tensor:
        """The weights, float32 [out_features, in_features]."""
        return _decode(self.data, self.bits)[: self.out_features, : self.in_features]

    def dequantize_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs, integers [R]: float32 [R, in_features]."""
        tiles, lanes = rows // TILE_OUTPUTS, rows % TILE_OUTPUTS
        wanted = _decode(self.data[tiles], self.bits).view(rows.numel(), TILE_OUTPUTS, -1)
        return wanted[torch.arange(rows.numel(), device=rows.device), lanes, : self.in_features]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Several matrices of one input whose outputs lie side by side.

    All segments but the last have a multiple of 16 outputs.
    """

    segments: tuple[PackedMatrix, ...]

    def __post_init__(self) -> None:
        assert len({segment.in_features for segment in self.segments}) == 1
        assert all(segment.out_features % TILE_OUTPUTS == 0 for segment in self.segments[:-1])

    @property
    def out_features(self) -> int:
        return sum(segment.out_features for segment in self.segments)

    @property
    def in_features(self) -> int:
        return self.segments[0].in_features

    @property
    def nbytes(self) -> int:
        """What codes, scales and minimums take."""
        return sum(segment.data.nbytes for segment in self.segments)

    def dequantize(self) -> torch.Tensor:
        """The weights, float32 [out_features, in_features]."""
        return torch.cat([segment.dequantize() for segment in self.segments])


def packed_shape(bits: Bits, out_features: int, in_features: int) -> tuple[int, int, int]:
    """The shape of a matrix's `data`: tiles, groups, and bytes per record."""
    code_bytes = TILE_OUTPUTS * GROUP_INPUTS * bits // 8
    return -(-out_features // TILE_OUTPUTS), -(-in_features // GROUP_INPUTS), code_bytes + _NUMBERS_BYTES


def _decode(records: torch.Tensor, bits: Bits) -> torch.Tensor:
    """Records uint8 [tiles, groups, bytes] -> float32 [16 tiles, 32 groups]."""
    tiles, groups, record_bytes = records.shape
    stored = records[..., : record_bytes - _NUMBERS_BYTES].unflatten(2, (-1, TILE_OUTPUTS, _QUAD_INPUTS))
    codes = torch.cat((stored & 15, stored >> 4), dim=2) if bits == 4 else stored
    numbers = records[..., record_bytes - _NUMBERS_BYTES :].contiguous().view(torch.float16).float()
    scales, minimums = numbers.view(tiles, groups, 2, 1, TILE_OUTPUTS, 1).unbind(2)
    values = codes.float() * scales + minimums  # [tiles, groups, quads, outputs, inputs of a quad]
    return values.permute(0, 3, 1, 2, 4).reshape(tiles * TILE_OUTPUTS, groups * GROUP_INPUTS)
