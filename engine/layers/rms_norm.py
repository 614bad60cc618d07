"""The weight of a root-mean-square norm; the norm itself is part of a fused step (`engine.kernels.ops`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.layers.placement import Placement
from engine.layers.weight_slot import CopySlot, WeightSlot


class RmsNorm(torch.nn.Module):
    """Weight [size] and epsilon; whoever consumes the normed values applies it."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = placement.parameter(size)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield "weight", CopySlot(self.weight)
