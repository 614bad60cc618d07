"""Kernels for matrices of floats: what packs activations for them, the product, and looking tokens up.

The counterparts of `engine.cpu.pack_kernels`, `engine.cpu.matrix_kernels` and of the look-up in
`engine.cpu.row_kernels`, with the same arguments; nothing is rounded to less than float32.  Widths are multiples of
16.  Recorded by `engine.cpu.ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.activations import FLOAT_ACTIVATION_BYTES as ACTIVATION_BYTES
from engine.cpu.activations import FLOAT_GROUP as GROUP
from engine.cpu.activations import LANES
from engine.cpu.float_tile import float_tile, load_number, tiles_at_once, vector_bytes
from engine.cpu.gelu import gelu
from engine.cpu.kernel import Body
from engine.cpu.lanes import Emitter, Lanes
from engine.cpu.memory import claim, float32s, int32s, int64s, read_arguments
from engine.cpu.norm_kernel import normed_rows
from engine.cpu.row_blocks import block_rows
from engine.cpu.step import NUM_TOKENS

_TILE_BYTES = 4 * LANES
_CHUNKS_PER_THREAD = 2
_CHUNK_BYTES = 1 << 19
"""The most weights a chunk has, so that they stay in a second-level cache."""
_CHUNK_TILES = 4
"""A chunk is a multiple of this, the most that are computed at once."""
_GATE_CHUNK = 32
"""Groups of a gate that are claimed together: some microseconds of work."""

Values = Callable[[Emitter, list[ir.Value]], Lanes]


def float_matrix(number_format: int, most_rows: int) -> Body:
    """Arguments: activations, weights, bias, output and its stride, groups, tiles, which step number counts rows."""
    group_bytes = GROUP * vector_bytes(number_format)
    wide_1, wide_2, wide_4 = (tiles_at_once(rows, most_rows) for rows in (1, 2, 4))

    def kernel(arguments, step, rank, size):
        activations, weights, bias, output, stride, groups, num_tiles, rows_at = read_arguments(arguments, 8)
        num_rows = int64s(step, 8)[rows_at]
        height = block_rows(num_rows, most_rows)
        tile_bytes = groups * group_bytes
        chunk = min(num_tiles // (size * _CHUNKS_PER_THREAD), _CHUNK_BYTES // tile_bytes)
        chunk = max(chunk // _CHUNK_TILES, 1) * _CHUNK_TILES
        first = claim(arguments) * chunk
        while first < num_tiles:
            last = min(first + chunk, num_tiles)
            for row in range(0, num_rows, height):
                block = activations + row * groups * ACTIVATION_BYTES
                tile = first
                while tile < last:
                    rest = last - tile
                    values = weights + tile * tile_bytes
                    added = bias + tile * _TILE_BYTES
                    place = output + row * stride + tile * _TILE_BYTES
                    width = 1
                    # A tile's height and width are constants to the compiler.
                    if height == 1 and rest >= wide_1:
                        width = wide_1
                        float_tile(1, wide_1, number_format, block, values, tile_bytes, added, place, stride, groups)
                    elif height == 1:
                        float_tile(1, 1, number_format, block, values, tile_bytes, added, place, stride, groups)
                    elif height == 2 and rest >= wide_2:
                        width = wide_2
                        float_tile(2, wide_2, number_format, block, values, tile_bytes, added, place, stride, groups)
                    elif height == 2:
                        float_tile(2, 1, number_format, block, values, tile_bytes, added, place, stride, groups)
                    elif wide_4 > 1 and height == 4 and rest >= wide_4:
                        width = wide_4
                        float_tile(4, wide_4, number_format, block, values, tile_bytes, added, place, stride, groups)
                    elif height == 4:
                        float_tile(4, 1, number_format, block, values, tile_bytes, added, place, stride, groups)
                    elif most_rows > 4 and height == 8:
                        float_tile(8, 1, number_format, block, values, tile_bytes, added, place, stride, groups)
                    elif most_rows > 4:
                        float_tile(16, 1, number_format, block, values, tile_bytes, added, place, stride, groups)
                    tile += width
            first = claim(arguments) * chunk

    return kernel


def _writer(num_sources: int, values: Values, *, has_factor: bool = False) -> tuple[Any, Any]:
    """An intrinsic (sources..., [factor], target) that writes the 16 float32 which `values` makes of its operands."""
    operands = [types.int64] * num_sources + [types.float32] * has_factor
    signature = types.void(*operands, types.int64)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        emit.store_floats(values(emit, arguments[:-1]), arguments[-1])
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _write_plain(typing_context: Any, source: Any, target: Any) -> tuple[Any, Any]:
    """Copy 16 float32."""
    return _writer(1, lambda emit, sources: emit.load_floats(sources[0]))


@intrinsic
def _write_scaled(typing_context: Any, source: Any, weights: Any, factor: Any, target: Any) -> tuple[Any, Any]:
    """Write source · factor · weights, 16 float32 each and one."""

    def scaled(emit: Emitter, operands: list[ir.Value]) -> Lanes:
        source, weights, factor = operands
        return emit.load_floats(source) * emit.splat(factor) * emit.load_floats(weights)

    return _writer(2, scaled, has_factor=True)


@intrinsic
def _write_gated(typing_context: Any, gate: Any, up: Any, target: Any) -> tuple[Any, Any]:
    """Write silu(gate) · up, 16 float32 each."""

    def gated(emit: Emitter, sources: list[ir.Value]) -> Lanes:
        return emit.silu(emit.load_floats(sources[0])) * emit.load_floats(sources[1])

    return _writer(2, gated)


@intrinsic
def _write_gelu(typing_context: Any, source: Any, target: Any) -> tuple[Any, Any]:
    """Write the GELU of 16 float32."""
    return _writer(1, lambda emit, sources: gelu(emit, emit.load_floats(sources[0])))


@numba.njit(error_model="numpy")
def _place(packed, row, group, num_groups, height):
    """The address of one row's inputs of one group, in packed activations."""
    return packed + ((row // height * num_groups + group) * height + row % height) * ACTIVATION_BYTES


@numba.njit(error_model="numpy")
def _write_normed_row(source, weight, factor, columns, packed, row, height):
    num_groups = columns // GROUP
    for group in range(num_groups):
        offset = group * GROUP * 4
        _write_scaled(source + offset, weight + offset, factor, _place(packed, row, group, num_groups, height))


def norm_floats(most_rows: int) -> Body:
    """Root-mean-square norm of a sum; arguments as of `normed_rows`."""
    return normed_rows(most_rows, _write_normed_row)


def plain_floats(most_rows: int) -> Body:
    """Arguments: source and its stride, columns, packed, which step number counts the rows."""
    return _packed_rows(most_rows, _write_plain)


def gelu_floats(most_rows: int) -> Body:
    """GELU of a row.  Arguments as of `plain_floats`."""
    return _packed_rows(most_rows, _write_gelu)


def _packed_rows(most_rows: int, write: Any) -> Body:
    """One row after the other, `write` for each group of it."""

    def kernel(arguments, step, rank, size):
        source, stride, columns, packed, rows_at = read_arguments(arguments, 5)
        num_rows = int64s(step, 8)[rows_at]
        height = block_rows(num_rows, most_rows)
        num_groups = columns // GROUP
        row = claim(arguments)
        while row < num_rows:
            for group in range(num_groups):
                place = _place(packed, row, group, num_groups, height)
                write(source + row * stride + group * GROUP * 4, place)
            row = claim(arguments)

    return kernel


def gate_floats(most_rows: int) -> Body:
    """silu(gate) · up of [gate, up] side by side.  Arguments as of `plain_floats`; columns are those of one half."""

    def kernel(arguments, step, rank, size):
        source, stride, columns, packed, rows_at = read_arguments(arguments, 5)
        num_rows = int64s(step, 8)[rows_at]
        height = block_rows(num_rows, most_rows)
        num_groups = columns // GROUP
        num_chunks = (num_groups + _GATE_CHUNK - 1) // _GATE_CHUNK
        piece = claim(arguments)
        while piece < num_rows * num_chunks:
            row, first = piece // num_chunks, piece % num_chunks * _GATE_CHUNK
            for group in range(first, min(first + _GATE_CHUNK, num_groups)):
                gate = source + row * stride + group * GROUP * 4
                _write_gated(gate, gate + columns * 4, _place(packed, row, group, num_groups, height))
            piece = claim(arguments)

    return kernel


def embed_floats(number_format: int) -> Body:
    """Rows of a packed matrix.  Arguments: token ids, weights, groups, output and its stride.

    A row's numbers lie a vector apart, so whole cache lines are read for one or two of them: some microseconds per
    token, far less than a row-major copy of the table would cost in memory where it is the output head too.
    """
    lane_vector_bytes = vector_bytes(number_format)
    item_bytes = lane_vector_bytes // LANES

    def kernel(arguments, step, rank, size):
        ids, weights, num_groups, output, stride = read_arguments(arguments, 5)
        num_tokens = int64s(step, 8)[NUM_TOKENS]
        token_ids = int32s(ids, num_tokens)
        columns = num_groups * GROUP
        token = claim(arguments)
        while token < num_tokens:
            row = np.int64(token_ids[token])
            place = weights + row // LANES * columns * lane_vector_bytes + row % LANES * item_bytes
            values = float32s(output + token * stride, columns)
            for column in range(columns):
                values[column] = load_number(number_format, place + column * lane_vector_bytes)
            token = claim(arguments)

    return kernel
