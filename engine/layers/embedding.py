"""Token embedding; a tied model uses its weight as the output head too."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.layers.placement import Placement
from engine.layers.rms_norm import RmsNorm
from engine.layers.weight_slot import CopySlot, WeightSlot


class TokenEmbedding(torch.nn.Module):
    """One row per token of the vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self._ops = placement.ops
        self.weight = placement.parameter(vocab_size, hidden_size)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [T] -> a fresh tensor [T, hidden_size]."""
        return self._ops.embed(token_ids, self.weight)

    def project(self, norm: RmsNorm, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [N, hidden_size] -> scores of its norm [N, vocab_size]."""
        return self._ops.norm_linear(hidden, None, norm.weight, norm.eps, self.weight, None)[0]

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield "weight", CopySlot(self.weight)
