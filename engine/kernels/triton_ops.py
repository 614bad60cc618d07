"""`Ops` for NVIDIA GPUs: kernels of our own while reading the weights bounds a product, cuBLAS beyond.

Knows the sizes at which one way overtakes the other, measured by benchmarks/kernels/linear_ops.py,
and nothing about models.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear

from engine.kernels import skinny_linear as skinny
from engine.kernels.gated import silu_mul
from engine.kernels.rms_norm import add_rms_norm
from engine.kernels.rotation_tables import rotation_tables

# With three or four rows the arithmetic shows on weights of more elements, and cuBLAS is faster.
_MAX_ROWS_OF_LARGE_WEIGHT = 2
_LARGE_WEIGHT = 8 * 2**20


class TritonOps:
    """See `engine.kernels.ops.Ops`; weights are tensors."""

    def embed(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return embedding(token_ids, weight)

    def rotation_tables(
        self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotation_tables(positions, inverse_frequencies, scale)

    def norm_linear(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _is_skinny(hidden, weight):
            return skinny.norm_skinny_linear(hidden, residual, norm_weight, eps, weight, bias)
        normed, total = add_rms_norm(hidden, residual, norm_weight, eps)
        return linear(normed, weight, bias), total

    def linear(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if _is_skinny(hidden, weight):
            return skinny.skinny_linear(hidden, weight, bias)
        return linear(hidden, weight, bias)

    def gated_linear(self, gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if _is_skinny(gate_up, weight):
            return skinny.gated_skinny_linear(gate_up, weight, bias)
        return linear(silu_mul(gate_up), weight, bias)

    def add(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return hidden.add_(residual)


def _is_skinny(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    if hidden.shape[0] > _MAX_ROWS_OF_LARGE_WEIGHT and weight.numel() > _LARGE_WEIGHT:
        return False
    return skinny.supports(hidden, weight)
