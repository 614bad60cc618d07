"""The gated feed-forward block: down(silu(gate(x)) · up(x)) (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import silu

from engine.layers.linear import Linear, MergedLinear
from engine.layers.weight_slot import WeightSlot, slots_under


class GatedMlp(torch.nn.Module):
    """Gate and up projections run as one product.  Input and output [T, hidden_size]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias, device=device, dtype=dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, device=device, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        product: torch.Tensor = self.down_proj(silu(gate).mul_(up))
        return product

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield from self.gate_up_proj.weight_slots()
        yield from slots_under("down_proj", self.down_proj)
