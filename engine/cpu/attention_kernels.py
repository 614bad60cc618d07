"""Attention over the paged cache as a kernel: pieces of work (`engine.cpu.attention_plan`) by KV head, claimed.

Cache of a layer: keys [block, KV head, head_dim, block_size], values [block, KV head, block_size, head_dim], where
other layers' lie between the blocks.
Recorded by `engine.attention.compiled_paged`.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from engine.cpu.activations import LANES
from engine.cpu.attention_merge import merge_states, scale_row
from engine.cpu.attention_shape import (
    CHUNK_TOKENS,
    CHUNK_VECTORS,
    HEADER_BYTES,
    NEXT_PLACES,
    NUM_PIECES,
    PIECE_CHUNK,
    PIECE_FIELDS,
    PIECE_FIRST,
    PIECE_PARTIAL,
    PIECE_ROW,
    PIECE_START,
    PIECE_TOKENS,
    AttentionShape,
)
from engine.cpu.attention_tile import STATISTICS_BYTES, VECTOR_BYTES, attend_chunk
from engine.cpu.kernel import Body
from engine.cpu.memory import claim, fetch_add, float32s, int32s, int64s, read_arguments


def attention(head_dim: int, group: int, max_sums: int, block_size: int, item_bytes: int) -> Body:
    """Arguments: queries and their stride, output and its stride, keys, values, plan, partial states, counters of
    split tiles, scratch of all threads, block tables and their stride, KV heads, bytes from block to block.

    Queries are rotated, [token, head, head_dim]; the output is laid out alike.
    """
    shape = AttentionShape(head_dim, group, max_sums)
    num_slabs, tile_heads = shape.num_slabs, shape.tile_heads
    query_bytes, weight_bytes, state_bytes = shape.query_bytes, shape.weight_bytes, shape.state_bytes
    scratch_bytes = shape.scratch_bytes
    attend = _attend(shape, block_size, item_bytes)

    def kernel(arguments, step, rank, size):
        numbers = read_arguments(arguments, 14)
        queries, query_stride, output, output_stride, keys, values, plan = numbers[:7]
        partials, counters, scratch, tables, table_stride, num_kv_heads, block_bytes = numbers[7:]
        query_tile = scratch + rank * scratch_bytes
        weights = query_tile + query_bytes
        own_state = weights + weight_bytes
        places = own_state + 2 * state_bytes
        tiles_per_piece = num_kv_heads * num_slabs
        num_pieces = int64s(plan, 1)[NUM_PIECES]
        item = claim(arguments)
        while item < num_pieces * tiles_per_piece:
            # One KV head after the other, so that tiles of one prompt find its keys and values in the cache.
            part = item // num_pieces
            piece = int32s(plan + HEADER_BYTES + 4 * PIECE_FIELDS * (item % num_pieces), PIECE_FIELDS)
            kv_head, first_head = part // num_slabs, part % num_slabs * tile_heads
            num_heads = min(tile_heads, group - first_head)
            first_head += kv_head * group
            first, tokens = np.int64(piece[PIECE_FIRST]), np.int64(piece[PIECE_TOKENS])
            start, only_chunk = np.int64(piece[PIECE_START]), np.int64(piece[PIECE_CHUNK])
            context = start + tokens
            num_chunks = (context + CHUNK_TOKENS - 1) // CHUNK_TOKENS
            table = tables + np.int64(piece[PIECE_ROW]) * table_stride
            head_offset = kv_head * head_dim * block_size * item_bytes
            source = queries + first * query_stride + first_head * head_dim * 4
            _load_queries(source, query_stride, tokens, num_heads, query_tile, tile_heads, head_dim)
            first_partial = np.int64(piece[PIECE_PARTIAL]) * tiles_per_piece + part
            begin, end, state = np.int64(0), num_chunks, own_state
            if only_chunk >= 0:
                begin, end = only_chunk, only_chunk + 1
                state = partials + (first_partial + only_chunk * tiles_per_piece) * state_bytes
            for chunk in range(begin, end):
                position = chunk * CHUNK_TOKENS
                num_tokens = min(CHUNK_TOKENS, context - position)
                _find_places(
                    table, position, context - 1, keys + head_offset, values + head_offset, block_bytes,
                    block_size, item_bytes, head_dim * item_bytes, places,
                )  # fmt: skip
                target = state if chunk == begin else own_state + state_bytes
                visible = start + 1 - position
                attend(tokens, query_tile, places, weights, target, visible, num_tokens)
                if chunk > begin:
                    merge_states(state, target, tokens * tile_heads, head_dim // LANES)
            if only_chunk >= 0:
                state = partials + first_partial * state_bytes
                distance = tiles_per_piece * state_bytes
                if not _merge_if_last(
                    counters + 8 * first_partial, num_chunks, state, distance, tokens * tile_heads, head_dim // LANES
                ):
                    num_heads = 0
            target = output + first * output_stride + first_head * head_dim * 4
            _write_rows(state, tokens, num_heads, tile_heads, head_dim, target, output_stride)
            item = claim(arguments)

    return kernel


def _attend(shape: AttentionShape, block_size: int, item_bytes: int) -> Any:
    """A compiled `attend_chunk` for tiles of one token's heads, or of a prompt."""
    head_dim, tile_heads, tile_rows = shape.head_dim, shape.tile_heads, shape.tile_rows
    has_prompt_tiles = tile_rows > tile_heads

    @numba.njit(error_model="numpy")
    def attend(tokens, queries, places, weights, state, visible, num_tokens):
        # A tile's height is a constant to the compiler.
        if has_prompt_tiles and tokens > 1:
            attend_chunk(
                tile_rows, tile_heads, head_dim, block_size, item_bytes,
                queries, places, weights, state, visible, num_tokens,
            )  # fmt: skip
        else:
            attend_chunk(
                tile_heads, tile_heads, head_dim, block_size, item_bytes,
                queries, places, weights, state, visible, num_tokens,
            )  # fmt: skip

    return attend


@numba.njit(error_model="numpy")
def _load_queries(source, stride, num_tokens, num_heads, tile, tile_heads, head_dim):
    """Copy queries to a tile, scaled by head_dim^(-1/2) · log2 e."""
    factor = np.float32(math.log2(math.e) / math.sqrt(head_dim))
    for token in range(num_tokens):
        for head in range(num_heads):
            row = tile + (token * tile_heads + head) * head_dim * 4
            scale_row(source + token * stride + head * head_dim * 4, row, factor, head_dim // LANES)


@numba.njit(error_model="numpy")
def _find_places(
    table, position, last, keys, values, block_bytes, block_size, key_bytes, value_bytes, places
):  # fmt: skip
    """Addresses of keys and values of each 16 tokens of the chunk at `position`, then of the next chunk's first keys.

    `last` is the context's last token; places beyond it are those of its vector.
    """
    key_places = int64s(places, CHUNK_VECTORS)
    value_places = int64s(places + 8 * CHUNK_VECTORS, CHUNK_VECTORS)
    next_places = int64s(places + 8 * 2 * CHUNK_VECTORS, NEXT_PLACES)
    blocks = int32s(table, last // block_size + 1)
    num_vectors = min((last - position) // LANES + 1, CHUNK_VECTORS)
    for index in range(num_vectors):
        token = position + index * LANES
        block = np.int64(blocks[token // block_size]) * block_bytes
        key_places[index] = keys + block + token % block_size * key_bytes
        value_places[index] = values + block + token % block_size * value_bytes
    for index in range(num_vectors, CHUNK_VECTORS):
        key_places[index] = key_places[num_vectors - 1]
        value_places[index] = value_places[num_vectors - 1]
    for index in range(NEXT_PLACES):
        token = min(position + (CHUNK_VECTORS + index) * LANES, last)
        block = np.int64(blocks[token // block_size]) * block_bytes
        next_places[index] = keys + block + token % block_size * key_bytes


@numba.njit(error_model="numpy")
def _merge_if_last(counter, num_chunks, state, distance, num_rows, row_vectors):
    """Whether all other chunks of a split tile are done; if so, merge their states, `distance` apart, into the first.

    The counter is then ready for the next layer.
    """
    if fetch_add(counter, 1) != num_chunks - 1:
        return False
    int64s(counter, 1)[0] = 0
    for chunk in range(1, num_chunks):
        merge_states(state, state + chunk * distance, num_rows, row_vectors)
    return True


@numba.njit(error_model="numpy")
def _write_rows(state, num_tokens, num_heads, tile_heads, head_dim, output, stride):
    """Sums of values divided by sums of weights."""
    sums = float32s(state + VECTOR_BYTES, LANES)
    for token in range(num_tokens):
        for head in range(num_heads):
            row = token * tile_heads + head
            source = state + STATISTICS_BYTES + row * head_dim * 4
            target = output + token * stride + head * head_dim * 4
            scale_row(source, target, np.float32(1.0) / sums[row], head_dim // LANES)
