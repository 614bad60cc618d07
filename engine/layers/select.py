"""Chooses which layers a model is built of, by its placement; the model files do not know."""

from __future__ import annotations

from collections.abc import Mapping

from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.packed_linear import PackedEmbedding, PackedLinear
from engine.layers.placement import Placement


def new_linear(
    in_features: int, parts: Mapping[str, int], placement: Placement, *, bias: bool
) -> Linear | PackedLinear:
    """A linear of `parts`; see `Linear`."""
    kind = Linear if placement.packed_ops is None else PackedLinear
    return kind(in_features, parts, placement, bias=bias)


def new_embedding(vocab_size: int, hidden_size: int, placement: Placement) -> TokenEmbedding | PackedEmbedding:
    """A token embedding; see `TokenEmbedding`."""
    kind = TokenEmbedding if placement.packed_ops is None else PackedEmbedding
    return kind(vocab_size, hidden_size, placement)
