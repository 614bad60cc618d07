"""Token embedding and output head; a tied head uses the embedding's own weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import embedding, linear

from engine.layers.weight_slot import CopySlot, WeightSlot, empty_parameter


class TokenEmbedding(torch.nn.Module):
    """One row per token of the vocabulary; `project` makes it the output head of a tied model."""

    def __init__(self, vocab_size: int, hidden_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, device=device, dtype=dtype)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [T] -> a fresh tensor [T, hidden_size]."""
        return embedding(token_ids, self.weight)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [N, hidden_size] -> scores [N, vocab_size]."""
        return linear(hidden, self.weight)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield "weight", CopySlot(self.weight)
