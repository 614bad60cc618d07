"""What comes before attention: norms of heads, rotation, keys and values into the paged cache.

Queries stay where they are, in the layer's projection.  Recorded by `engine.attention.compiled_paged`.
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
from engine.cpu.attention_tile import VECTOR_BYTES
from engine.cpu.kernel import Body
from engine.cpu.lanes import FLOATS, HALVES, INT32, Emitter, Lanes, Loop
from engine.cpu.memory import claim, float32s, int64s, read_arguments
from engine.cpu.step import NUM_TOKENS

_MOST_TOKENS = 16
"""Tokens claimed together: a block's, mostly, whose keys share cache lines."""


@intrinsic
def _sum_squares(typing_context: Any, values: Any, num_vectors: Any) -> tuple[Any, Any]:
    """Of 16 · `num_vectors` float32."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        loop = Loop(emit, arguments[1], [arguments[0], ir.Constant(FLOATS, [0.0] * LANES)])
        place, total = loop.values
        value = emit.load_floats(place)
        total = loop.close([emit.at(place, VECTOR_BYTES), (value * value + Lanes(emit, total)).value])[1]
        return Lanes(emit, total).sum()

    return types.float32(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def _store_head(
    typing_context: Any, item_bytes: Any, item_stride: Any, source: Any, target: Any, num_vectors: Any
) -> tuple[Any, Any]:
    """Write 16 · `num_vectors` float32 to the cache, as float16 or as they are, `item_stride` numbers apart.

    `item_bytes` and `item_stride` are constants.
    """
    num_bytes, stride = item_bytes.literal_value, item_stride.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        loop = Loop(emit, arguments[4], [arguments[2], arguments[3]])
        place, target_place = loop.values
        value = emit.load_floats(place).value
        if num_bytes == 2:
            value = builder.fptrunc(value, HALVES)
        if stride == 1:
            emit.store(value, target_place)
        else:
            for lane in range(LANES):
                emit.store(builder.extract_element(value, INT32(lane)), target_place, lane * stride * num_bytes)
        loop.close([emit.at(place, VECTOR_BYTES), emit.at(target_place, LANES * stride * num_bytes)])
        return context.get_dummy_value()

    return types.void(item_bytes, item_stride, *[types.int64] * 3), generate


def store_heads(head_dim: int, block_size: int, item_bytes: int, has_norms: bool) -> Body:
    """Arguments: projection and its stride, cos, sin and their stride, slots, keys, values, norm weights of queries
    and keys, epsilon as float32 bits, heads, KV heads, bytes from block to block.

    The projection is [token, heads + 2 KV heads, head_dim], cos and sin [token, head_dim / 2].  Tokens whose slot is
    negative are stored nowhere.
    """
    head_bytes = 4 * head_dim
    num_vectors = head_dim // LANES
    kv_bytes = head_dim * block_size * item_bytes

    def kernel(arguments, step, rank, size):
        numbers = read_arguments(arguments, 14)
        projection, stride, cos, sin, table_stride, slots, keys, values = numbers[:8]
        query_norm, key_norm, _, num_heads, num_kv_heads, block_bytes = numbers[8:]
        eps = float32s(arguments + 8 * 11, 1)[0]
        num_tokens = int64s(step, 8)[NUM_TOKENS]
        targets = int64s(slots, num_tokens)
        chunk = max(1, min(num_tokens // (4 * size), _MOST_TOKENS))
        first = claim(arguments) * chunk
        while first < num_tokens:
            for token in range(first, min(first + chunk, num_tokens)):
                row = projection + token * stride
                for head in range(num_heads + num_kv_heads):
                    if has_norms:
                        _norm_head(row + head * head_bytes, query_norm if head < num_heads else key_norm, eps, head_dim)
                    _rotate(row + head * head_bytes, cos + token * table_stride, sin + token * table_stride, head_dim)
                slot = targets[token]
                if slot < 0:
                    continue
                offset = slot % block_size
                key_row = row + num_heads * head_bytes
                for kv_head in range(num_kv_heads):
                    place = slot // block_size * block_bytes + kv_head * kv_bytes
                    key = key_row + kv_head * head_bytes
                    value = key + num_kv_heads * head_bytes
                    _store_head(item_bytes, block_size, key, keys + place + offset * item_bytes, num_vectors)
                    value_place = values + place + offset * head_dim * item_bytes
                    _store_head(item_bytes, 1, value, value_place, num_vectors)
            first = claim(arguments) * chunk

    return kernel


@numba.njit(error_model="numpy")
def _norm_head(head, weight, eps, head_dim):
    """Root-mean-square norm, in place."""
    values, weights = float32s(head, head_dim), float32s(weight, head_dim)
    mean = _sum_squares(head, head_dim // LANES) / np.float32(head_dim)
    factor = np.float32(1.0) / np.float32(math.sqrt(mean + eps))
    for index in range(head_dim):
        values[index] = values[index] * factor * weights[index]


@numba.njit(error_model="numpy")
def _rotate(head, cos, sin, head_dim):
    """Rotate by halves, in place: number i with number i + head_dim / 2."""
    num_pairs = head_dim // 2
    low, high = float32s(head, num_pairs), float32s(head + 4 * num_pairs, num_pairs)
    cosines, sines = float32s(cos, num_pairs), float32s(sin, num_pairs)
    for pair in range(num_pairs):
        first, second = low[pair], high[pair]
        low[pair] = first * cosines[pair] - second * sines[pair]
        high[pair] = second * cosines[pair] + first * sines[pair]
