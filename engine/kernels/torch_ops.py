"""`Ops` in plain torch: what the CPU runs without compiled kernels, and what all kernels are compared with.

Packed weights are dequantised anew for each product: slow, and as exact as float32 is.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from engine.layers.packed_weight import PackedWeight
from engine.layers.rotary import tables_with_torch


class TorchOps:
    """See `engine.kernels.ops.Ops`; takes both kinds of weight."""

    def embed(self, token_ids: torch.Tensor, weight: torch.Tensor | PackedWeight) -> torch.Tensor:
        if isinstance(weight, PackedWeight):
            (table,) = weight.segments
            return table.dequantize_rows(token_ids)
        return embedding(token_ids, weight)

    def rotation_tables(
        self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return tables_with_torch(positions, inverse_frequencies, scale)

    def norm_linear(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor | PackedWeight,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden if residual is None else hidden + residual
        return linear(rms_norm(total, norm_weight.shape, norm_weight, eps), _as_tensor(weight), bias), total

    def linear(
        self, hidden: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return linear(hidden, _as_tensor(weight), bias)

    def gated_linear(
        self, gate_up: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return linear(silu(gate).mul_(up), _as_tensor(weight), bias)

    def add(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return hidden.add_(residual)


def _as_tensor(weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, PackedWeight) else weight
