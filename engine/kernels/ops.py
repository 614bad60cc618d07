"""`Ops`: the fused steps a decoder is made of, besides attention.

A model is built with the `Ops` of its device and calls nothing else, so model files know neither
Triton nor batch sizes.  `engine.kernels.torch_ops` is the reference and serves every device and every kind
of weight; `engine.kernels.triton_ops` serves NVIDIA GPUs.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

Weight = TypeVar("Weight", contravariant=True)
"""What a matrix [N, K] is kept as: a tensor, or an `engine.layers.packed_weight.PackedWeight`."""


class Ops(Protocol[Weight]):
    """T tokens; tensors in the model's dtype and contiguous; no argument is written to, but for `add`'s."""

    def embed(self, token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Token ids, integers [T], and weight [V, H] -> a fresh tensor [T, H] of their rows."""
        ...

    def rotation_tables(
        self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions, integers [T], and radians per position, float32 [P] -> scale · cos, scale · sin, float32 [T, P].

        The angles of a token are its position times the frequencies (Su et al. 2021, arXiv 2104.09864).
        """
        ...

    def norm_linear(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, normalise, project: hidden and residual [T, K], weight [N, K] -> output [T, N] and the sum [T, K].

        The sum, hidden + residual, is the next residual; without a residual it is `hidden` itself.  The norm is
        x / sqrt(mean(x²) + eps) · norm_weight (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).
        """
        ...

    def linear(self, hidden: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """hidden [T, K], weight [N, K] -> hidden · weightᵀ + bias [T, N]."""
        ...

    def gated_linear(self, gate_up: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """gate_up [T, 2 I], weight [N, I] -> linear(silu(gate) · up) [T, N] (Shazeer 2020, arXiv 2002.05202)."""
        ...

    def add(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """hidden + residual [T, H]; the result may be `hidden` itself, written over."""
        ...
