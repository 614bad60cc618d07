"""The weights of a layer norm; the norm itself is part of a fused step (`engine.kernels.encoder_ops`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.kernels.encoder_ops import NormWeights
from engine.layers.placement import Placement
from engine.layers.weight_slot import CopySlot, WeightSlot


class LayerNorm(torch.nn.Module):
    """Weight [size], bias [size] and epsilon; whoever makes the values to be normed applies it."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = placement.parameter(size)
        self.bias = placement.parameter(size)

    @property
    def weights(self) -> NormWeights:
        """What a fused step takes."""
        return NormWeights(self.weight, self.bias, self.eps)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield "weight", CopySlot(self.weight)
        yield "bias", CopySlot(self.bias)
