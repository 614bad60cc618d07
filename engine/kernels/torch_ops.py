"""`Ops` in plain torch: what the CPU runs, and what the Triton kernels are compared with."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, rms_norm, silu


class TorchOps:
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
        total = hidden if residual is None else hidden + residual
        return linear(rms_norm(total, norm_weight.shape, norm_weight, eps), weight, bias), total

    def linear(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(hidden, weight, bias)

    def gated_linear(self, gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return linear(silu(gate).mul_(up), weight, bias)
