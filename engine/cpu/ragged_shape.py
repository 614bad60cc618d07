"""How much room attention within whole texts works in: what its kernels and whoever records them agree on.

Imports no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.cpu.activations import LANES, splits_floats
from engine.cpu.attention_shape import CHUNK_TOKENS, AttentionShape, max_sums

POOLING_MODES = ("mean", "cls", "last")
"""Which tokens of a text make its vector: all alike, the first, or the last."""

QUERIES = 2 * LANES
"""Queries that are computed at once with split numbers, ..."""
STAGED_TOKENS = 2 * LANES
"""... and keys and values that are packed together."""
_FLOAT_BYTES = 4
_ROW_GAP_BYTES = 64
"""By how much rows of scores lie further apart than they are long, so that they share fewer sets of a cache."""


class Room(Protocol):
    """What a thread works in: `fixed_bytes`, and `token_bytes` for each of `tokens(longest)`."""

    @property
    def fixed_bytes(self) -> int: ...

    @property
    def token_bytes(self) -> int: ...

    def tokens(self, longest: int) -> int:
        """The tokens of the longest text, rounded up to what is handled together."""
        ...


@dataclass(frozen=True, slots=True)
class SplitRoom:
    """See `Room`; for `engine.cpu.split_attention`."""

    head_dim: int

    @property
    def staged_bytes(self) -> int:
        return STAGED_TOKENS * self.head_dim * _FLOAT_BYTES

    @property
    def query_bytes(self) -> int:
        return QUERIES * self.head_dim * _FLOAT_BYTES

    @property
    def fixed_bytes(self) -> int:
        """Staged rows, queries and results, sums of weights, and the gaps between rows of scores."""
        return self.staged_bytes + 2 * self.query_bytes + (_FLOAT_BYTES + _ROW_GAP_BYTES) * QUERIES

    @property
    def token_bytes(self) -> int:
        """Keys and values, and weights and scores of the queries at work."""
        return 2 * self.head_dim * _FLOAT_BYTES + 2 * QUERIES * _FLOAT_BYTES

    def tokens(self, longest: int) -> int:
        return -(-longest // STAGED_TOKENS) * STAGED_TOKENS

    def score_stride(self, tokens: int) -> int:
        """Bytes from row to row of the scores of so many tokens."""
        return tokens * _FLOAT_BYTES + _ROW_GAP_BYTES


@dataclass(frozen=True, slots=True)
class FloatRoom:
    """See `Room`; for `engine.cpu.float_attention`."""

    shape: AttentionShape

    @property
    def fixed_bytes(self) -> int:
        """What a tile of queries needs."""
        return self.shape.scratch_bytes

    @property
    def token_bytes(self) -> int:
        """Keys and values."""
        return 2 * self.shape.head_dim * _FLOAT_BYTES

    def tokens(self, longest: int) -> int:
        return -(-longest // CHUNK_TOKENS) * CHUNK_TOKENS


def float_shape(head_dim: int, sums: int) -> AttentionShape:
    """Tiles in which each query is a head of one token, as it were: all of them see the same keys."""
    widest = AttentionShape(head_dim, 1, sums)
    return AttentionShape(head_dim, widest.max_rows, sums)


def ragged_room(head_dim: int) -> Room:
    """Of the kernel that this processor runs."""
    return SplitRoom(head_dim) if splits_floats() else FloatRoom(float_shape(head_dim, max_sums()))
