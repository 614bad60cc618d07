"""`Linear`: one matrix product, fed by one checkpoint tensor or by several stacked ones.

A model calls a linear and asks it for weight slots, nothing else, so a quantised layer
(`engine.layers.packed_linear`) or a sharded one can take its place without the model file
knowing.  What comes right before the product, a norm or a gate, is applied with it, because
one kernel may do both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from engine.kernels.ops import Ops
from engine.layers.placement import Placement
from engine.layers.rms_norm import RmsNorm
from engine.layers.weight_slot import CopySlot, WeightSlot


class Product:
    """The products with a layer's `weight`, of whatever kind its `_ops` compute with."""

    _ops: Ops[Any]
    weight: Any
    bias: torch.Tensor | None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ops.linear(hidden, self.weight, self.bias)

    def after_norm(
        self, norm: RmsNorm, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of norm(hidden + residual), and that sum [T, in_features], the next residual."""
        return self._ops.norm_linear(hidden, residual, norm.weight, norm.eps, self.weight, self.bias)

    def after_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The product of silu(gate) · up, which lie side by side in gate_up [T, 2 in_features]."""
        return self._ops.gated_linear(gate_up, self.weight, self.bias)


class Linear(Product, torch.nn.Module):
    """y = x Wᵀ + b, of one projection or of several of the same input, whose outputs lie side by side.

    `parts` maps each projection's checkpoint name to its number of output features, in output order;
    the name "" means that the layer is the projection.  Input [T, in_features], output [T, sum of parts].
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], placement: Placement, *, bias: bool) -> None:
        super().__init__()
        out_features = sum(parts.values())
        self._parts = dict(parts)
        self._ops = placement.ops
        self.weight = placement.parameter(out_features, in_features)
        self.bias = placement.parameter(out_features) if bias else None

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        start = 0
        for name, size in self._parts.items():
            prefix = f"{name}." if name else ""
            yield f"{prefix}weight", CopySlot(self.weight.narrow(0, start, size))
            if self.bias is not None:
                yield f"{prefix}bias", CopySlot(self.bias.narrow(0, start, size))
            start += size
