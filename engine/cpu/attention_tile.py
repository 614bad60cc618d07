"""A tile of attention: some rows of queries over one chunk of a paged context, in float32 whatever the cache holds.

Keys lie transposed, sixteen tokens to a vector, so scores need no sums over lanes; values lie token by token.
Each chunk has its own softmax: weights are 2^(score - peak), since queries come scaled by log2 e as well.
A row goes through the same operations whatever the number of rows, so its result does too.
Used by `engine.cpu.attention_kernels`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.activations import LANES
from engine.cpu.attention_shape import CHUNK_TOKENS, NEXT_PLACES, AttentionShape, max_sums
from engine.cpu.lanes import INT8, INT32, INT64, INTS, Emitter, Lanes, Loop

VECTOR_BYTES = 4 * LANES
STATISTICS_BYTES = 2 * VECTOR_BYTES
LOWEST = -1e30
"""A peak below all scores; finite, so that differences of peaks are numbers."""
_ROW_BYTES = 4 * CHUNK_TOKENS
_AHEAD = NEXT_PLACES
"""By how many vectors of tokens reading values is begun early; keys by those that are multiplied at once."""
_LINE_BYTES = 64
_ROUNDER = 1.5 * 2**23
_EXP2_COEFFICIENTS = (1, 0.6931471806, 0.2402234904, 0.05550381014, 0.009666368515, 0.001338130254)
"""1 + r · p(r) for 2^r: p, of degree 4, equals (2^r - 1) / r at the Chebyshev nodes of [-1/2, 1/2]."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Constants of one compiled tile: `rows` queries, `heads` per token, cache of `item_bytes` per number."""

    shape: AttentionShape
    rows: int
    heads: int
    block_size: int
    item_bytes: int

    @property
    def is_decode(self) -> bool:
        """Whether all rows are of one token, so that reading keys and values takes longer than computing."""
        return self.rows == self.heads

    def load(self, emit: Emitter, address: ir.Value, offset: int) -> Lanes:
        """Sixteen numbers of the cache."""
        return emit.load_halves(address, offset) if self.item_bytes == 2 else emit.load_floats(address, offset)


@intrinsic(prefer_literal=True)
def attend_chunk(
    typing_context: Any,
    rows: Any,
    heads: Any,
    head_dim: Any,
    block_size: Any,
    item_bytes: Any,
    queries: Any,
    places: Any,
    weights: Any,
    state: Any,
    num_visible: Any,
    num_tokens: Any,
) -> tuple[Any, Any]:
    """Attend to `num_tokens` tokens of one chunk; the constants are the first five.

    `queries` float32 [rows, head_dim]; `places` int64, addresses of keys and then of values of each 16 tokens,
    CHUNK_VECTORS each, and then NEXT_PLACES of keys that are needed next; `weights` is room for float32
    [rows, CHUNK_TOKENS].  The first token's rows see `num_visible` tokens of the chunk, each later token's one more.
    Leaves in `state`, all float32: peaks [16], sums of weights [16], sums of values [rows, head_dim].
    """
    constants = [value.literal_value for value in (rows, heads, head_dim, block_size, item_bytes)]

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        num_rows, num_heads, dim, size, num_bytes = constants
        shape = AttentionShape(dim, num_heads, max_sums())
        tile = _Tile(shape, num_rows, num_heads, size, num_bytes)
        query, place, weight, target, visible, count = arguments[5:]
        emit = Emitter(builder)
        num_vectors = builder.udiv(builder.add(count, INT64(LANES - 1)), INT64(LANES))
        _score(emit, tile, query, place, weight, num_vectors)
        _soften(emit, tile, weight, target, visible, num_vectors)
        values = emit.at(place, 8 * (CHUNK_TOKENS // LANES))
        _sum_values(emit, tile, values, weight, emit.at(target, STATISTICS_BYTES), count)
        return context.get_dummy_value()

    return types.void(rows, heads, head_dim, block_size, item_bytes, *[types.int64] * 6), generate


def _score(
    emit: Emitter, tile: _Tile, queries: ir.Value, places: ir.Value, scores: ir.Value, num_vectors: ir.Value
) -> None:
    """Products of all queries with all keys."""
    builder = emit.builder
    width = tile.shape.score_width(tile.rows)
    query_bytes = 4 * tile.shape.head_dim
    num_turns = builder.udiv(builder.add(num_vectors, INT64(width - 1)), INT64(width))
    turns = Loop(emit, num_turns, [places, scores])
    place, target = turns.values
    bases = [emit.load(place, 8 * index, INT64) for index in range(width)]
    next_bases = [emit.load(place, 8 * (width + index), INT64) for index in range(width)] if tile.is_decode else []
    zero = emit.floats(0.0).value
    dims = Loop(emit, INT64(tile.shape.head_dim), [queries, INT64(0), *[zero] * (tile.rows * width)])
    query, offset, *totals = dims.values
    keys = [tile.load(emit, emit.at(base, offset), 0) for base in bases]
    for next_base in next_bases:
        prefetch(emit, emit.at(next_base, offset))
    sums = []
    for row in range(tile.rows):
        number = emit.load_splat(query, row * query_bytes)
        sums += [number * key + Lanes(emit, totals[row * width + index]) for index, key in enumerate(keys)]
    next_offset = emit.at(offset, tile.block_size * tile.item_bytes)
    totals = dims.close([emit.at(query, 4), next_offset, *[total.value for total in sums]])[2:]
    for row in range(tile.rows):
        for index in range(width):
            emit.store(totals[row * width + index], target, row * _ROW_BYTES + index * VECTOR_BYTES)
    turns.close([emit.at(place, 8 * width), emit.at(target, width * VECTOR_BYTES)])


def _soften(
    emit: Emitter, tile: _Tile, scores: ir.Value, statistics: ir.Value, visible: ir.Value, num_vectors: ir.Value
) -> None:
    """Scores to weights in place, zero for tokens that a row does not see; peaks and sums of weights."""
    builder = emit.builder
    rows = Loop(emit, INT64(tile.rows), [scores, INT64(0)])
    place, row = rows.values
    hide_from(emit, place, builder.add(visible, builder.udiv(row, INT64(tile.heads))), num_vectors)
    peak = largest(emit, place, num_vectors)
    vectors = Loop(emit, num_vectors, [place, emit.floats(0.0).value])
    vector, total = vectors.values
    weight = exp2(emit, emit.load_floats(vector) - peak)
    emit.store_floats(weight, vector)
    total = vectors.close([emit.at(vector, VECTOR_BYTES), (Lanes(emit, total) + weight).value])[1]
    target = emit.at(statistics, builder.mul(row, INT64(4)))
    emit.store(builder.extract_element(peak.value, INT32(0)), target)
    emit.store(Lanes(emit, total).sum(), target, VECTOR_BYTES)
    rows.close([emit.at(place, _ROW_BYTES), emit.at(row, 1)])


def hide_from(emit: Emitter, scores: ir.Value, seen: ir.Value, num_vectors: ir.Value) -> None:
    """Put scores from number `seen` on, which may be negative or beyond the end, below all others."""
    builder = emit.builder
    last = builder.sub(num_vectors, INT64(1))
    first = builder.ashr(seen, INT64(LANES.bit_length() - 1))
    first = builder.select(builder.icmp_signed("<", first, last), first, last)
    first = builder.select(builder.icmp_signed("<", first, INT64(0)), INT64(0), first)
    lanes = Lanes(emit, ir.Constant(INTS, list(range(LANES))))
    tokens = lanes + emit.splat(builder.trunc(builder.mul(first, INT64(LANES)), INT32))
    limit = emit.splat(builder.trunc(seen, INT32))
    place = emit.at(scores, builder.mul(first, INT64(VECTOR_BYTES)))
    loop = Loop(emit, builder.sub(num_vectors, first), [place, tokens.value])
    place, token = loop.values
    is_seen = builder.icmp_signed("<", token, limit.value)
    hidden = emit.floats(-math.inf).value
    emit.store(builder.select(is_seen, emit.load_floats(place).value, hidden), place)
    loop.close([emit.at(place, VECTOR_BYTES), (Lanes(emit, token) + emit.ints(LANES)).value])


def largest(emit: Emitter, scores: ir.Value, num_vectors: ir.Value) -> Lanes:
    """The largest score of a row, in every lane."""
    loop = Loop(emit, num_vectors, [scores, emit.floats(LOWEST).value])
    place, peaks = loop.values
    peaks = loop.close([emit.at(place, VECTOR_BYTES), larger(emit, emit.load_floats(place), Lanes(emit, peaks)).value])[
        1
    ]
    folded = Lanes(emit, peaks)
    for distance in (8, 4, 2, 1):
        folded = larger(emit, folded, folded.shuffled([lane ^ distance for lane in range(LANES)]))
    return folded


def _sum_values(
    emit: Emitter, tile: _Tile, places: ir.Value, weights: ir.Value, target: ir.Value, num_tokens: ir.Value
) -> None:
    """Sums of values by weight, some vectors of all rows at a time."""
    builder = emit.builder
    width = tile.shape.value_width(tile.rows)
    row_bytes = 4 * tile.shape.head_dim
    zeros = [emit.floats(0.0).value] * (tile.rows * width)
    strips = Loop(emit, INT64(tile.shape.head_dim // LANES // width), [INT64(0), target])
    offset, strip_target = strips.values
    num_turns = builder.udiv(builder.add(num_tokens, INT64(LANES - 1)), INT64(LANES))
    turns = Loop(emit, num_turns, [places, weights, num_tokens, *zeros])
    place, weight, remaining, *totals = turns.values
    is_short = builder.icmp_signed("<", remaining, INT64(LANES))
    count = builder.select(is_short, remaining, INT64(LANES))
    first = emit.at(emit.load(place, 0, INT64), offset)
    ahead = emit.at(emit.load(place, 8 * _AHEAD, INT64), offset) if tile.is_decode else None
    totals = _add_tokens(emit, tile, first, ahead, weight, count, totals)
    following = [emit.at(place, 8), emit.at(weight, VECTOR_BYTES), emit.at(remaining, -LANES)]
    totals = turns.close([*following, *totals])[3:]
    for row in range(tile.rows):
        for index in range(width):
            emit.store(totals[row * width + index], strip_target, row * row_bytes + index * VECTOR_BYTES)
    strip_bytes = width * LANES * tile.item_bytes
    strips.close([emit.at(offset, strip_bytes), emit.at(strip_target, width * VECTOR_BYTES)])


def _add_tokens(
    emit: Emitter,
    tile: _Tile,
    values: ir.Value,
    ahead: ir.Value | None,
    weights: ir.Value,
    count: ir.Value,
    totals: list[ir.Value],
) -> list[ir.Value]:
    """Add `count` values that lie one behind the other to the totals of all rows; fetch as many from `ahead`."""
    width = len(totals) // tile.rows
    tokens = Loop(emit, count, [values, weights, *totals])
    place, weight, *carried = tokens.values
    vectors = [tile.load(emit, place, index * LANES * tile.item_bytes) for index in range(width)]
    if ahead is not None:
        next_place = emit.at(ahead, emit.builder.sub(place, values))
        for line in range(0, width * LANES * tile.item_bytes, _LINE_BYTES):
            prefetch(emit, emit.at(next_place, line))
    sums = []
    for row in range(tile.rows):
        factor = emit.load_splat(weight, row * _ROW_BYTES)
        sums += [factor * vector + Lanes(emit, carried[row * width + index]) for index, vector in enumerate(vectors)]
    value_bytes = tile.shape.head_dim * tile.item_bytes
    return tokens.close([emit.at(place, value_bytes), emit.at(weight, 4), *[total.value for total in sums]])[2:]


def exp2(emit: Emitter, exponents: Lanes) -> Lanes:
    """2 to the power of each lane, none above 127, to a relative 2e-7; exactly 1 at 0, and exactly 0 up to -127.

    2^x = 2^n · 2^r with n = round(x) and |r| <= 1/2.  A sum with 1.5 · 2^23 has n in its lowest bits, and leaves n
    when that is subtracted again; n is then added to the exponent of 2^r, whose bits at n = -127, r = 0 are zero.
    """
    confined = larger(emit, exponents, emit.floats(-127.0))
    shifted = confined + emit.floats(_ROUNDER)
    rest = confined - (shifted - emit.floats(_ROUNDER))
    result = emit.floats(_EXP2_COEFFICIENTS[-1])
    for coefficient in _EXP2_COEFFICIENTS[-2::-1]:
        result = result * rest + emit.floats(coefficient)
    builder = emit.builder
    whole = builder.shl(builder.bitcast(shifted.value, INTS), emit.ints(23).value)
    return Lanes(emit, builder.add(builder.bitcast(result.value, INTS), whole)).as_float_bits()


def prefetch(emit: Emitter, address: ir.Value) -> None:
    """Begin to read the cache line at `address`, which need not be valid."""
    pointer = emit.builder.inttoptr(address, INT8.as_pointer())
    emit.call("llvm.prefetch.p0", ir.VoidType(), pointer, INT32(0), INT32(3), INT32(1))


def larger(emit: Emitter, left: Lanes, right: Lanes) -> Lanes:
    """The larger of two lanes; the right one's if the left is NaN.  One instruction, where `maximum` takes three."""
    is_larger = emit.builder.fcmp_ordered(">", left.value, right.value)
    return Lanes(emit, emit.builder.select(is_larger, left.value, right.value))
