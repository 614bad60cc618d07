"""`Ops` for NVIDIA GPUs: kernels of our own while memory and gaps between kernels bound a product, cuBLAS beyond.

Knows the sizes at which one way overtakes the other, measured by benchmarks/kernels/linear_ops.py,
and nothing about models.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from engine.kernels import skinny_linear as skinny
from engine.kernels import split_linear as split
from engine.kernels.gated import silu_mul
from engine.kernels.rms_norm import add_rms_norm

# Weights of more elements cuBLAS reads as fast as `split_linear`.
_MAX_SPLIT_WEIGHT = 8 * 2**20


class TritonOps:
    """See `engine.kernels.ops.Ops`.  Calls are to follow one another on one stream."""

    def __init__(self) -> None:
        self._counters: torch.Tensor | None = None

    def norm_linear(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if skinny.supports(hidden, weight):
            return skinny.norm_skinny_linear(hidden, residual, norm_weight, eps, weight, bias)
        normed, total = add_rms_norm(hidden, residual, norm_weight, eps)
        return self.linear(normed, weight, bias), total

    def linear(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        counters = self._counters_on(hidden.device)
        if skinny.supports(hidden, weight):
            return skinny.skinny_linear(hidden, weight, bias)
        if weight.numel() <= _MAX_SPLIT_WEIGHT and split.supports(hidden, weight):
            return split.split_linear(hidden, weight, bias, counters)
        return linear(hidden, weight, bias)

    def gated_linear(self, gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if skinny.supports(gate_up, weight):
            return skinny.gated_skinny_linear(gate_up, weight, bias)
        return self.linear(silu_mul(gate_up), weight, bias)

    def _counters_on(self, device: torch.device) -> torch.Tensor:
        """Made by the first product of any size: a captured graph would fill them only when it runs."""
        if self._counters is None or self._counters.device != device:
            self._counters = split.allocate_counters(device)
        return self._counters
