"""Linear layers: one matrix product, fed by one checkpoint tensor or by several stacked ones.

A model calls a linear and asks it for weight slots, nothing else, so a quantised or a
sharded layer can take its place without the model file knowing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.nn.functional import linear

from engine.layers.weight_slot import CopySlot, WeightSlot, empty_parameter


class MergedLinear(torch.nn.Module):
    """Several projections of the same input as one product; their outputs lie side by side.

    `parts` maps each projection's checkpoint name to its number of output features, in
    output order.  Input [T, in_features], output [T, sum of parts].
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, bias: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = sum(parts.values())
        self._parts = dict(parts)
        self.weight = empty_parameter(self.out_features, in_features, device=device, dtype=dtype)
        self.bias = empty_parameter(self.out_features, device=device, dtype=dtype) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight, self.bias)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        start = 0
        for name, size in self._parts.items():
            yield f"{name}.weight", CopySlot(self.weight.narrow(0, start, size))
            if self.bias is not None:
                yield f"{name}.bias", CopySlot(self.bias.narrow(0, start, size))
            start += size


class Linear(torch.nn.Module):
    """y = x Wᵀ + b.  Input [T, in_features], output [T, out_features]."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = empty_parameter(out_features, in_features, device=device, dtype=dtype)
        self.bias = empty_parameter(out_features, device=device, dtype=dtype) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight, self.bias)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield "weight", CopySlot(self.weight)
        if self.bias is not None:
            yield "bias", CopySlot(self.bias)
