"""Layer norms as kernels: of a sum, and of the sum of a token's embeddings.

Each leaves its rows as float32, which the next sum reads, and packed for the product that follows.  The norm is
(x - mean) / sqrt(variance + epsilon) · weight + bias (Ba et al. 2016, https://arxiv.org/abs/1607.06450); the variance
is that of the differences, so that nothing cancels.  Rows have a multiple of 32 columns.
Recorded by `engine.cpu.encoder_ops`.
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
from engine.cpu.kernel import Body
from engine.cpu.lanes import Emitter, Lanes, Loop
from engine.cpu.memory import claim, float32s, int32s, int64s, read_arguments
from engine.cpu.packed_rows import GROUP, packed_height, packed_place, write_normed
from engine.cpu.step import NUM_TOKENS

_VECTOR_BYTES = 4 * LANES
_CLAIMED_ROWS = 8
"""Rows of a norm that are claimed together: some microseconds of work."""


def layer_norm(is_split: bool, most_rows: int) -> Body:
    """Arguments: hidden and residual with their strides, the normed sum and its stride, packed, weight, bias, epsilon
    as float32 bits, columns, which step number counts the rows."""
    norm = _norm_of(is_split)
    splits = int(is_split)

    def kernel(arguments, step, rank, size):
        numbers = read_arguments(arguments, 12)
        hidden, hidden_stride, residual, residual_stride, output, stride, packed = numbers[:7]
        weight, bias, _, columns, rows_at = numbers[7:]
        eps = float32s(arguments + 8 * 10, 1)[0]
        num_rows = int64s(step, 8)[rows_at]
        height = packed_height(num_rows, splits, most_rows)
        start = claim(arguments) * _CLAIMED_ROWS
        while start < num_rows:
            for row in range(start, min(start + _CLAIMED_ROWS, num_rows)):
                target = output + row * stride
                total = _add(hidden + row * hidden_stride, residual + row * residual_stride, target, columns // LANES)
                norm(total, target, weight, bias, eps, columns, packed, row, height)
            start = claim(arguments) * _CLAIMED_ROWS

    return kernel


def embed_norm(is_split: bool, most_rows: int) -> Body:
    """Arguments: token ids, positions and types, the tables [rows, columns] of each, the normed sum and its stride,
    packed, weight, bias, epsilon as float32 bits, columns."""
    norm = _norm_of(is_split)
    splits = int(is_split)

    def kernel(arguments, step, rank, size):
        numbers = read_arguments(arguments, 13)
        ids, places, kinds, words, positions, types_, output, stride, packed = numbers[:9]
        weight, bias, _, columns = numbers[9:]
        eps = float32s(arguments + 8 * 12, 1)[0]
        num_tokens = int64s(step, 8)[NUM_TOKENS]
        height = packed_height(num_tokens, splits, most_rows)
        row_bytes = columns * 4
        token_ids, token_places = int32s(ids, num_tokens), int32s(places, num_tokens)
        token_kinds = int32s(kinds, num_tokens)
        token = claim(arguments)
        while token < num_tokens:
            target = output + token * stride
            word = words + np.int64(token_ids[token]) * row_bytes
            place = positions + np.int64(token_places[token]) * row_bytes
            kind = types_ + np.int64(token_kinds[token]) * row_bytes
            _add(word, kind, target, columns // LANES)
            total = _add(target, place, target, columns // LANES)
            norm(total, target, weight, bias, eps, columns, packed, token, height)
            token = claim(arguments)

    return kernel


def _norm_of(is_split: bool) -> Any:
    """A compiled norm of one row in place, whose sum is known, that also packs it."""
    splits = int(is_split)

    @numba.njit(error_model="numpy")
    def norm(total, row, weight, bias, eps, columns, packed, index, height):
        squares = _centre(row, total / np.float32(columns), columns // LANES)
        factor = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(columns) + eps))
        num_groups = columns // GROUP
        for group in range(num_groups):
            offset = group * GROUP * 4
            place = packed_place(packed, index, group, num_groups, height)
            write_normed(splits, row + offset, factor, weight + offset, bias + offset, place, 64 * height)

    return norm


@intrinsic
def _add(typing_context: Any, left: Any, right: Any, total: Any, num_vectors: Any) -> tuple[Any, Any]:
    """Write left + right to `total`, 16 · `num_vectors` float32 each; returns the sum of all."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        loop = Loop(emit, arguments[3], [*arguments[:3], emit.floats(0.0).value])
        left_place, right_place, place, sums = loop.values
        value = emit.load_floats(left_place) + emit.load_floats(right_place)
        emit.store_floats(value, place)
        following = [emit.at(address, _VECTOR_BYTES) for address in (left_place, right_place, place)]
        sums = loop.close([*following, (value + Lanes(emit, sums)).value])[3]
        return Lanes(emit, sums).sum()

    return types.float32(*[types.int64] * 4), generate


@intrinsic
def _centre(typing_context: Any, row: Any, mean: Any, num_vectors: Any) -> tuple[Any, Any]:
    """Subtract `mean` from 16 · `num_vectors` float32; returns the sum of the squares of what is left."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        means = emit.splat(arguments[1])
        loop = Loop(emit, arguments[2], [arguments[0], emit.floats(0.0).value])
        place, squares = loop.values
        value = emit.load_floats(place) - means
        emit.store_floats(value, place)
        squares = loop.close([emit.at(place, _VECTOR_BYTES), (value * value + Lanes(emit, squares)).value])[1]
        return Lanes(emit, squares).sum()

    return types.float32(types.int64, types.float32, types.int64), generate
