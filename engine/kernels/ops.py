"""`Ops`: the fused steps a decoder layer is made of, besides attention.

A model is built with the `Ops` of its device and calls nothing else, so model files know neither
Triton nor batch sizes.  `engine.kernels.torch_ops` is the reference and serves every device;
`engine.kernels.triton_ops` serves NVIDIA GPUs.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Ops(Protocol):
    """T tokens; all tensors in the model's dtype and contiguous; no argument is ever written to."""

    def norm_linear(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, normalise, project: hidden and residual [T, K], weight [N, K] -> output [T, N] and the sum [T, K].

        The sum, hidden + residual, is the next residual; without a residual it is `hidden` itself.  The norm is
        x / sqrt(mean(x²) + eps) · norm_weight (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).
        """
        ...

    def linear(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """hidden [T, K], weight [N, K] -> hidden · weightᵀ + bias [T, N]."""
        ...

    def gated_linear(self, gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """gate_up [T, 2 I], weight [N, I] -> linear(silu(gate) · up) [T, N] (Shazeer 2020, arXiv 2002.05202)."""
        ...
