"""How queries are grouped into tiles and contexts into chunks: the numbers that the attention kernels share.

The query heads of one KV head, of several tokens of one prompt, are the rows of a tile, so that keys and values are
loaded once for all of them.  Contexts are cut at positions that are multiples of `CHUNK_TOKENS`; each chunk has a
softmax of its own, and chunks are merged in order, so a row's result depends on its sequence alone.
The plan that `engine.cpu.attention_plan` makes of a step is laid out here too.  Imports no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cpu.activations import LANES
from engine.cpu.isa import host_isa

CHUNK_TOKENS = 256
CHUNK_VECTORS = CHUNK_TOKENS // LANES
NEXT_PLACES = 4
"""Vectors of the next chunk's keys whose places are known while a chunk is computed; they are read ahead."""
PLACES_BYTES = 64 * (8 * (2 * CHUNK_VECTORS + NEXT_PLACES) // 64 + 1)
_FLOAT_BYTES = 4
_MOST_WIDTH = NEXT_PLACES
_WIDE_SUMS = 28
"""Of 32 registers of sixteen lanes each."""
_NARROW_SUMS = 6
"""Of 16 registers of eight lanes each, or of 32 of four lanes."""


NUM_PIECES = 0
"""Where the plan says how many pieces follow its header."""
HEADER_BYTES = 64

PIECE_ROW = 0
"""The line of the block tables."""
PIECE_FIRST = 1
"""Its first token, among all of the step, ..."""
PIECE_TOKENS = 2
PIECE_START = 3
"""... and that token's position."""
PIECE_CHUNK = 4
"""The one chunk of the context that it covers, or -1 for all."""
PIECE_PARTIAL = 5
"""Where the states of the tile's chunks begin, in states of one piece; means nothing for all chunks."""
PIECE_FIELDS = 8


def plan_bytes(max_tokens: int, max_partials: int) -> int:
    """What the plan of the largest step takes."""
    return HEADER_BYTES + 4 * PIECE_FIELDS * (max_tokens + max_partials)


def max_sums() -> int:
    """Vectors of sixteen lanes that this processor's registers can sum up at once, beside what is added."""
    isa = host_isa()
    assert isa is not None, "this processor is not served"
    return _WIDE_SUMS if isa.tile_rows == LANES else _NARROW_SUMS


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`group`: query heads per KV head; `max_sums` as of the function."""

    head_dim: int
    group: int
    max_sums: int

    @property
    def max_rows(self) -> int:
        """Rows of a tile: with many registers half the sums, so that a query read serves two vectors of keys."""
        return self.max_sums // 2 if self.max_sums == _WIDE_SUMS else self.max_sums

    @property
    def num_slabs(self) -> int:
        """Tiles that the query heads of one KV head are spread over."""
        return -(-self.group // self.max_rows)

    @property
    def tile_heads(self) -> int:
        """Query heads in a tile; the last slab may have fewer."""
        return -(-self.group // self.num_slabs)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a prompt in a tile."""
        return self.max_rows // self.tile_heads

    @property
    def tile_rows(self) -> int:
        """Rows of a prompt's tile: token by token, and head by head in each."""
        return self.tile_heads * self.tile_tokens

    def score_width(self, rows: int) -> int:
        """Vectors of keys that are multiplied with `rows` queries at once: a divisor of `CHUNK_VECTORS`."""
        width = 1
        while 2 * width * rows <= self.max_sums and width < _MOST_WIDTH:
            width *= 2
        return width

    def value_width(self, rows: int) -> int:
        """Vectors of a value that are summed up for `rows` queries at once: a divisor of those of a head."""
        num_vectors = self.head_dim // LANES
        most = max(1, self.max_sums // rows)
        return max(width for width in range(1, num_vectors + 1) if num_vectors % width == 0 and width <= most)

    @property
    def state_bytes(self) -> int:
        """What a chunk leaves of a tile: the peak and the sum of weights of each row, then weighted sums of values."""
        return (self.tile_rows * self.head_dim + 2 * LANES) * _FLOAT_BYTES

    @property
    def query_bytes(self) -> int:
        return self.tile_rows * self.head_dim * _FLOAT_BYTES

    @property
    def weight_bytes(self) -> int:
        return self.tile_rows * CHUNK_TOKENS * _FLOAT_BYTES

    @property
    def scratch_bytes(self) -> int:
        """What a thread works in: queries, weights, two states, and where keys and values of a chunk lie."""
        return self.query_bytes + self.weight_bytes + 2 * self.state_bytes + PLACES_BYTES
