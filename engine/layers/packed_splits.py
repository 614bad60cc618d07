"""`SplitMatrix`: a float32 matrix as two of bfloat16, in the order in which a unit for such tiles reads them.

A number x is kept as high = bfloat16(x) and low = bfloat16(x - high): sixteen bits of its significand.  A weight
[N, K] is cut into tiles of 16 outputs and groups of 32 inputs; a tile's group is one square of the high parts and one
of the low ones, each 16 lines of 16 outputs by two inputs, i and i + 16 of the group.  Inputs are paired like that
because activations then are, by whole vectors (`engine.cpu.split_emit`).  Knows no file format; made by
`engine.cpu.encoder_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SPLIT_OUTPUTS = 16
SPLIT_INPUTS = 32


@dataclass(frozen=True, slots=True)
class SplitMatrix:
    """One matrix; `data` is bfloat16 [tiles, groups, 2, 16 lines, 16 outputs, 2 inputs], contiguous."""

    out_features: int
    in_features: int
    data: torch.Tensor

    def dequantize_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs, integers [R]: float32 [R, in_features]."""
        return self.dequantize()[rows]

    def dequantize(self) -> torch.Tensor:
        """The weights, float32 [out_features, in_features]."""
        whole = self.data.float().sum(dim=2)
        return whole.permute(0, 3, 1, 4, 2).reshape(self.out_features, self.in_features)


def split(parts: Sequence[torch.Tensor]) -> SplitMatrix:
    """The matrix whose outputs are those of `parts`, floats [rows, K]; in all a multiple of 16, K one of 32."""
    exact = torch.cat([part.float() for part in parts])
    out_features, in_features = exact.shape
    assert out_features % SPLIT_OUTPUTS == 0 and in_features % SPLIT_INPUTS == 0
    high = exact.bfloat16()
    low = (exact - high.float()).bfloat16()
    both = torch.stack((high, low))
    half = SPLIT_INPUTS // 2
    squares = both.view(2, out_features // SPLIT_OUTPUTS, SPLIT_OUTPUTS, in_features // SPLIT_INPUTS, 2, half)
    return SplitMatrix(out_features, in_features, squares.permute(1, 3, 0, 5, 2, 4).contiguous())
