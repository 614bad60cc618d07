"""`Ops` for NVIDIA GPUs: fused small-batch products while memory bounds them, cuBLAS beyond.

Knows the batch sizes at which one way overtakes the other, measured by
benchmarks/kernels/linear_ops.py, and nothing about models.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from engine.kernels.gated import silu_mul
from engine.kernels.rms_norm import add_rms_norm
from engine.kernels.skinny_linear import gated_skinny_linear, norm_skinny_linear, skinny_linear, supports

# Above these row counts a norm or activation recomputed by every program costs more than its own kernel,
# and cuBLAS reads the weights as fast as the kernels here.
_MAX_FUSED_ROWS = 4
_MAX_SKINNY_ROWS = 8


class TritonOps:
    """See `engine.kernels.ops.Ops`."""

    def norm_linear(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _may_fuse(hidden, weight):
            return norm_skinny_linear(hidden, residual, norm_weight, eps, weight, bias)
        normed, total = add_rms_norm(hidden, residual, norm_weight, eps)
        return self.linear(normed, weight, bias), total

    def linear(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if hidden.shape[0] <= _MAX_SKINNY_ROWS and supports(hidden, weight):
            return skinny_linear(hidden, weight, bias)
        return linear(hidden, weight, bias)

    def gated_linear(self, gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if _may_fuse(gate_up, weight):
            return gated_skinny_linear(gate_up, weight, bias)
        return self.linear(silu_mul(gate_up), weight, bias)


def _may_fuse(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    return hidden.shape[0] <= _MAX_FUSED_ROWS and supports(hidden, weight)
