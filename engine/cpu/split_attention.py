"""Attention within whole texts as a kernel, in split numbers: every token of a text to every other, nothing cached.

A piece of work is one head of one text.  Its keys and values become tiles of weights once, then 32 queries at a time
are multiplied with all keys, the softmax of each row is taken, and the weights are multiplied with all values: the same
two products as any other (`engine.cpu.split_tile`).  A row's result depends on its text alone.
Recorded by `engine.attention.compiled_ragged`.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.activations import LANES
from engine.cpu.attention_tile import exp2, hide_from, largest
from engine.cpu.kernel import Body
from engine.cpu.lanes import INT64, Emitter, Lanes, Loop
from engine.cpu.memory import claim, float32s, int32s, int64s, read_arguments
from engine.cpu.packed_rows import packed_place, write_scaled
from engine.cpu.ragged_shape import QUERIES, STAGED_TOKENS, SplitRoom
from engine.cpu.split_emit import close_squares, open_squares, split_pair
from engine.cpu.split_layout import GROUP_BYTES, PANEL_ROW_BYTES, ROW_BYTES, SQUARE_BYTES
from engine.cpu.split_tile import split_tile
from engine.cpu.step import NUM_SEQUENCES, SEQUENCE_FIELDS, SEQUENCE_FIRST, SEQUENCE_TOKENS

GROUP = 2 * LANES
_VECTOR_BYTES = 4 * LANES


def split_attention(head_dim: int) -> Body:
    """Arguments: panels of queries, keys and values and how far they are apart, packed output, sequences, heads,
    zeros, scratch of all threads, tokens that there is room for in it.

    `head_dim` is a multiple of 32.
    """
    head_groups, head_bytes = head_dim // GROUP, head_dim * 4
    key_bytes = head_groups * GROUP_BYTES
    factor = np.float32(math.log2(math.e) / math.sqrt(head_dim))
    room = SplitRoom(head_dim)
    fixed_bytes, token_bytes = room.fixed_bytes, room.token_bytes
    staged_bytes, query_bytes, row_gap = room.staged_bytes, room.query_bytes, room.score_stride(0)

    @numba.njit(error_model="numpy")
    def attend(source, width, panel_bytes, count, own, zeros, packed, first, first_group, num_groups):
        groups = (count + GROUP - 1) // GROUP
        staging, queries, sums = own, own + staged_bytes, own + staged_bytes + query_bytes
        results = sums + 4 * QUERIES
        keys = results + query_bytes
        values = keys + groups * 2 * key_bytes
        weights = values + groups * 2 * key_bytes
        scores = weights + groups * 2 * GROUP_BYTES
        score_stride = groups * GROUP * 4 + row_gap
        for group in range(groups):
            rows, distance = _staged(source + width, panel_bytes, head_groups, group * GROUP, count, staging)
            pack_keys(head_dim, rows, distance, keys + group * 2 * key_bytes, key_bytes)
            rows, distance = _staged(source + 2 * width, panel_bytes, head_groups, group * GROUP, count, staging)
            pack_values(head_dim, rows, distance, values + group * GROUP_BYTES, groups * GROUP_BYTES)
        for start in range(0, count, QUERIES):
            rows, distance = _staged(source, panel_bytes, head_groups, start, count, staging)
            num_queries = min(QUERIES, count - start)
            pack_queries(head_dim, rows, distance, factor, queries, key_bytes)
            for group in range(groups):
                target = scores + group * GROUP * 4
                tiles = keys + group * 2 * key_bytes
                if num_queries > LANES:
                    split_tile(2, 0, queries, tiles, zeros, target, score_stride, head_groups)
                else:
                    split_tile(1, 0, queries, tiles, zeros, target, score_stride, head_groups)
            soften(scores, score_stride, weights, sums, num_queries, count, groups)
            for group in range(head_groups):
                tiles = values + group * 2 * groups * GROUP_BYTES
                target = results + group * PANEL_ROW_BYTES
                if num_queries > LANES:
                    split_tile(2, 0, weights, tiles, zeros, target, head_bytes, groups)
                else:
                    split_tile(1, 0, weights, tiles, zeros, target, head_bytes, groups)
            totals = float32s(sums, QUERIES)
            for row in range(num_queries):
                inverse = np.float32(1.0) / totals[row]
                for group in range(head_groups):
                    place = packed_place(packed, first + start + row, first_group + group, num_groups, LANES)
                    write_scaled(1, results + row * head_bytes + group * GROUP * 4, inverse, place, SQUARE_BYTES)

    def kernel(arguments, step, rank, size):
        qkv, panel_bytes, packed, sequences, num_heads, zeros, scratch, longest = read_arguments(arguments, 8)
        num_sequences = int64s(step, 8)[NUM_SEQUENCES]
        records = int32s(sequences, (num_sequences, SEQUENCE_FIELDS))
        own = scratch + rank * (fixed_bytes + longest * token_bytes)
        piece = claim(arguments)
        if piece >= num_sequences * num_heads:
            return
        open_squares()
        while piece < num_sequences * num_heads:
            sequence, head = piece // num_heads, piece % num_heads
            count, first = np.int64(records[sequence, SEQUENCE_TOKENS]), np.int64(records[sequence, SEQUENCE_FIRST])
            num_groups, first_group = num_heads * head_groups, head * head_groups
            source = qkv + first * PANEL_ROW_BYTES + first_group * panel_bytes
            width = num_groups * panel_bytes
            attend(source, width, panel_bytes, count, own, zeros, packed, first, first_group, num_groups)
            piece = claim(arguments)
        close_squares()

    return kernel


@numba.njit(error_model="numpy")
def _staged(source, panel_bytes, num_panels, start, count, staging):
    """Where 32 rows of a head from number `start` on are, and how far apart their panels are.

    Copied, with zeros behind, if there are fewer.
    """
    if start + STAGED_TOKENS <= count:
        return source + start * PANEL_ROW_BYTES, panel_bytes
    staged_bytes = STAGED_TOKENS * PANEL_ROW_BYTES
    num_present = (count - start) * GROUP
    for panel in range(num_panels):
        values = float32s(source + start * PANEL_ROW_BYTES + panel * panel_bytes, num_present)
        target = float32s(staging + panel * staged_bytes, STAGED_TOKENS * GROUP)
        for index in range(num_present):
            target[index] = values[index]
        for index in range(num_present, STAGED_TOKENS * GROUP):
            target[index] = np.float32(0.0)
    return staging, staged_bytes


@intrinsic(prefer_literal=True)
def pack_queries(
    typing_context: Any, head_dim: Any, source: Any, panel_bytes: Any, factor: Any, target: Any, block_bytes: Any
) -> tuple[Any, Any]:
    """32 rows of `head_dim` (a constant) float32 in panels, times a factor, as two blocks of packed activations."""
    num_groups = head_dim.literal_value // GROUP

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        address, distance, factor_value, place, block = arguments[1:]
        factors = emit.splat(factor_value)
        blocks = Loop(emit, INT64(2), [address, place])
        block_source, block_target = blocks.values
        rows = Loop(emit, INT64(LANES), [block_source, block_target])
        row, row_target = rows.values
        panel = row
        for group in range(num_groups):
            halves = [emit.load_floats(panel, half * _VECTOR_BYTES) * factors for half in range(2)]
            for part, pairs in enumerate(split_pair(emit, *halves)):
                emit.store(pairs.value, row_target, group * GROUP_BYTES + part * SQUARE_BYTES)
            panel = emit.at(panel, distance)
        after = rows.close([emit.at(row, PANEL_ROW_BYTES), emit.at(row_target, ROW_BYTES)])[0]
        blocks.close([after, emit.at(block_target, block)])
        return context.get_dummy_value()

    return types.void(head_dim, types.int64, types.int64, types.float32, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def pack_keys(
    typing_context: Any, head_dim: Any, source: Any, panel_bytes: Any, target: Any, tile_bytes: Any
) -> tuple[Any, Any]:
    """32 rows of `head_dim` (a constant) float32 in panels, the outputs of two tiles of weights."""
    num_groups = head_dim.literal_value // GROUP

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        address, distance, place, tile = arguments[1:]
        tiles = Loop(emit, INT64(2), [address, place])
        tile_source, tile_target = tiles.values
        groups = Loop(emit, INT64(num_groups), [tile_source, tile_target])
        row, group_target = groups.values
        group_source = row
        lines: list[list[Lanes]] = [[], []]
        for _ in range(LANES):
            pairs = split_pair(emit, emit.load_floats(row), emit.load_floats(row, _VECTOR_BYTES))
            for part in range(2):
                lines[part].append(pairs[part])
            row = emit.at(row, PANEL_ROW_BYTES)
        for part in range(2):
            for index, line in enumerate(_transposed(emit, lines[part])):
                emit.store(line.value, group_target, part * SQUARE_BYTES + index * ROW_BYTES)
        groups.close([emit.at(group_source, distance), emit.at(group_target, GROUP_BYTES)])
        tiles.close([emit.at(tile_source, LANES * PANEL_ROW_BYTES), emit.at(tile_target, tile)])
        return context.get_dummy_value()

    return types.void(head_dim, *[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def pack_values(
    typing_context: Any, head_dim: Any, source: Any, panel_bytes: Any, target: Any, tile_bytes: Any
) -> tuple[Any, Any]:
    """32 rows of `head_dim` (a constant) float32 in panels, the inputs of one group of each tile of weights."""
    num_tiles = head_dim.literal_value // LANES

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        address, distance, place, tile = arguments[1:]
        rows = Loop(emit, INT64(LANES), [address, place])
        row, line = rows.values
        panel, line_target = row, line
        for index in range(num_tiles):
            offset = index % 2 * _VECTOR_BYTES
            halves = [emit.load_floats(panel, offset + half * LANES * PANEL_ROW_BYTES) for half in range(2)]
            for part, pairs in enumerate(split_pair(emit, *halves)):
                emit.store(pairs.value, line_target, part * SQUARE_BYTES)
            line_target = emit.at(line_target, tile)
            panel = emit.at(panel, distance) if index % 2 else panel
        rows.close([emit.at(row, PANEL_ROW_BYTES), emit.at(line, ROW_BYTES)])
        return context.get_dummy_value()

    return types.void(head_dim, *[types.int64] * 4), generate


@intrinsic
def soften(
    typing_context: Any,
    scores: Any,
    stride: Any,
    weights: Any,
    sums: Any,
    num_rows: Any,
    num_tokens: Any,
    num_groups: Any,
) -> tuple[Any, Any]:
    """Scores to weights, as packed activations; `sums` gets those of each row's weights.

    Scores are powers of two already; those from number `num_tokens` on become 0.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        source, distance, target, totals, count, tokens, groups = arguments
        num_vectors = builder.mul(groups, INT64(2))
        block_bytes = builder.mul(groups, INT64(GROUP_BYTES))
        rows = Loop(emit, count, [source, INT64(0)])
        row, index = rows.values
        hide_from(emit, row, tokens, num_vectors)
        peak = largest(emit, row, num_vectors)
        block = builder.mul(builder.udiv(index, INT64(LANES)), block_bytes)
        line = emit.at(emit.at(target, block), builder.mul(builder.urem(index, INT64(LANES)), INT64(ROW_BYTES)))
        zero = emit.floats(0.0).value
        loop = Loop(emit, groups, [row, line, zero, zero])
        place, group_target, *carried = loop.values
        halves = [exp2(emit, emit.load_floats(place, half * _VECTOR_BYTES) - peak) for half in range(2)]
        for part, pairs in enumerate(split_pair(emit, *halves)):
            emit.store(pairs.value, group_target, part * SQUARE_BYTES)
        new_sums = [(Lanes(emit, total) + half).value for total, half in zip(carried, halves, strict=True)]
        ends = loop.close([emit.at(place, 2 * _VECTOR_BYTES), emit.at(group_target, GROUP_BYTES), *new_sums])
        total = (Lanes(emit, ends[2]) + Lanes(emit, ends[3])).sum()
        emit.store(total, emit.at(totals, builder.mul(index, INT64(4))))
        rows.close([emit.at(row, distance), emit.at(index, 1)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _transposed(emit: Emitter, lines: list[Lanes]) -> list[Lanes]:
    """Sixteen vectors of sixteen lanes with lines and lanes exchanged: squares within squares, largest first."""
    distance = LANES // 2
    while distance:
        exchanged = list(lines)
        for index in range(LANES):
            if index & distance:
                continue
            first, second = lines[index], lines[index + distance]
            low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
            high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
            exchanged[index] = first.merged(second, low)
            exchanged[index + distance] = first.merged(second, high)
        lines = exchanged
        distance //= 2
    return lines
