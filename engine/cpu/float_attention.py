"""Attention within whole texts as a kernel, in float32: every token of a text to every other, nothing cached.

The counterpart of `engine.cpu.split_attention`, with the same arguments.  A piece of work is one head of one text.  Its
keys and values are laid out once as the tiles of `engine.cpu.attention_tile` read them.  Recorded by
`engine.attention.compiled_ragged`.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from engine.cpu.activations import LANES
from engine.cpu.attention_merge import merge_states, scale_row
from engine.cpu.attention_shape import CHUNK_TOKENS, CHUNK_VECTORS, NEXT_PLACES
from engine.cpu.attention_tile import STATISTICS_BYTES, VECTOR_BYTES, attend_chunk
from engine.cpu.kernel import Body
from engine.cpu.memory import claim, float32s, int32s, int64s, read_arguments
from engine.cpu.packed_rows import GROUP, packed_height, packed_place, write_scaled
from engine.cpu.ragged_shape import FloatRoom, float_shape
from engine.cpu.step import NUM_SEQUENCES, NUM_TOKENS, SEQUENCE_FIELDS, SEQUENCE_FIRST, SEQUENCE_TOKENS


def float_attention(head_dim: int, max_sums: int, most_rows: int) -> Body:
    """Arguments: queries, keys and values side by side and their stride, packed output, sequences, heads, zeros,
    scratch of all threads, tokens that there is room for in it.

    `head_dim` is a multiple of 32.
    """
    shape = float_shape(head_dim, max_sums)
    room = FloatRoom(shape)
    tile_rows, head_bytes, head_groups = shape.tile_rows, head_dim * 4, head_dim // GROUP
    fixed_bytes, token_bytes = room.fixed_bytes, room.token_bytes
    query_bytes, weight_bytes, state_bytes = shape.query_bytes, shape.weight_bytes, shape.state_bytes
    chunk_bytes = CHUNK_TOKENS * head_bytes
    factor = np.float32(math.log2(math.e) / math.sqrt(head_dim))

    @numba.njit(error_model="numpy")
    def attend(source, width, stride, count, own, keys, values, packed, first, first_group, num_groups, height):
        queries, weights = own, own + query_bytes
        state = weights + weight_bytes
        next_state, places = state + state_bytes, state + 2 * state_bytes
        _lay_out(source + width, source + 2 * width, stride, count, head_dim, keys, values)
        for start in range(0, count, tile_rows):
            num_queries = min(tile_rows, count - start)
            for row in range(num_queries):
                place = source + (start + row) * stride
                scale_row(place, queries + row * head_bytes, factor, head_dim // LANES)
            for position in range(0, count, CHUNK_TOKENS):
                chunk = position // CHUNK_TOKENS * chunk_bytes
                _find_places(keys + chunk, values + chunk, head_bytes, places)
                num_tokens = min(CHUNK_TOKENS, count - position)
                target = state if position == 0 else next_state
                attend_chunk(
                    tile_rows, tile_rows, head_dim, CHUNK_TOKENS, 4,
                    queries, places, weights, target, num_tokens, num_tokens,
                )  # fmt: skip
                if position > 0:
                    merge_states(state, next_state, tile_rows, head_dim // LANES)
            sums = float32s(state + VECTOR_BYTES, LANES)
            for row in range(num_queries):
                inverse = np.float32(1.0) / sums[row]
                for group in range(head_groups):
                    place = packed_place(packed, first + start + row, first_group + group, num_groups, height)
                    result = state + STATISTICS_BYTES + row * head_bytes + group * GROUP * 4
                    write_scaled(0, result, inverse, place, 64 * height)

    def kernel(arguments, step, rank, size):
        qkv, stride, packed, sequences, num_heads, _, scratch, longest = read_arguments(arguments, 8)
        numbers = int64s(step, 8)
        num_sequences, height = numbers[NUM_SEQUENCES], packed_height(numbers[NUM_TOKENS], 0, most_rows)
        records = int32s(sequences, (num_sequences, SEQUENCE_FIELDS))
        own = scratch + rank * (fixed_bytes + longest * token_bytes)
        keys = own + fixed_bytes
        values = keys + longest * head_bytes
        width = num_heads * head_bytes
        piece = claim(arguments)
        while piece < num_sequences * num_heads:
            sequence, head = piece // num_heads, piece % num_heads
            count, first = np.int64(records[sequence, SEQUENCE_TOKENS]), np.int64(records[sequence, SEQUENCE_FIRST])
            source = qkv + first * stride + head * head_bytes
            first_group, num_groups = head * head_groups, num_heads * head_groups
            attend(source, width, stride, count, own, keys, values, packed, first, first_group, num_groups, height)
            piece = claim(arguments)

    return kernel


@numba.njit(error_model="numpy")
def _lay_out(keys, values, stride, count, head_dim, key_target, value_target):
    """Keys as [chunk, head_dim, CHUNK_TOKENS], values as [token, head_dim]."""
    for token in range(count):
        place = key_target + token // CHUNK_TOKENS * CHUNK_TOKENS * head_dim * 4 + token % CHUNK_TOKENS * 4
        key = float32s(keys + token * stride, head_dim)
        column = float32s(place, (head_dim - 1) * CHUNK_TOKENS + 1)
        for index in range(head_dim):
            column[index * CHUNK_TOKENS] = key[index]
        scale_row(values + token * stride, value_target + token * head_dim * 4, np.float32(1.0), head_dim // LANES)


@numba.njit(error_model="numpy")
def _find_places(keys, values, row_bytes, places):
    """Addresses of keys and values of each 16 tokens of a chunk; nothing is read ahead."""
    key_places = int64s(places, CHUNK_VECTORS)
    value_places = int64s(places + 8 * CHUNK_VECTORS, CHUNK_VECTORS)
    next_places = int64s(places + 8 * 2 * CHUNK_VECTORS, NEXT_PLACES)
    for index in range(CHUNK_VECTORS):
        key_places[index] = keys + index * LANES * 4
        value_places[index] = values + index * LANES * row_bytes
    for index in range(NEXT_PLACES):
        next_places[index] = keys
