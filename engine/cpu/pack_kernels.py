"""Kernels that end in packed activations: what feeds every matrix product.

Each row is quantised by itself, in groups of 32: codes are the nearest whole numbers to value · 127 / the
largest magnitude, from -127 to 127.  The norm or the gate before a product is computed on the way.
Recorded by `engine.cpu.ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.activations import EXACT_BITS, GROUP, LANES, SCALE, SCALED_SUM, START_4, START_8
from engine.cpu.kernel import Body
from engine.cpu.lanes import FLOAT32, INT8, INT32, INT64, Emitter, Lanes
from engine.cpu.memory import claim, int64s, read_arguments
from engine.cpu.norm_kernel import normed_rows
from engine.cpu.row_blocks import block_rows, group_place

_HALF_BYTES = 4 * LANES
_GATE_CHUNK = 16
"""Groups of a gate that are claimed together: some microseconds of work."""

Values = Callable[[Emitter, int], Lanes]


def _pack(emit: Emitter, values: Values, codes: ir.Value, numbers: ir.Value, distance: ir.Value) -> None:
    """Quantise the 32 values that `values` gives for the byte offsets of its halves, and store codes and numbers.

    The numbers are those of `engine.cpu.activations`, `distance` bytes apart.
    """
    builder = emit.builder
    low, high = values(emit, 0), values(emit, _HALF_BYTES)
    peak = low.magnitude().maximum(high.magnitude()).largest()
    has_values = builder.fcmp_ordered(">", peak, FLOAT32(0.0))
    inverse = builder.select(has_values, builder.fdiv(FLOAT32(127.0), peak), FLOAT32(0.0))
    step = builder.fmul(peak, FLOAT32(1 / 127))
    splat = emit.splat(inverse)
    whole = [(half * splat).rounded().to_int() for half in (low, high)]
    for index, half in enumerate(whole):
        emit.store(builder.trunc(half.value, ir.VectorType(INT8, LANES)), codes, LANES * index)
    total = (whole[0] + whole[1]).sum()
    stored = {
        SCALE: step,
        SCALED_SUM: builder.fmul(step, builder.sitofp(total, FLOAT32)),
        START_4: builder.sub(INT32(EXACT_BITS), builder.shl(total, INT32(3))),
        START_8: builder.sub(INT32(EXACT_BITS), builder.shl(total, INT32(7))),
    }
    for index, number in stored.items():
        emit.store(number, emit.at(numbers, builder.mul(distance, INT64(index))))


@intrinsic
def pack_plain(typing_context: Any, source: Any, codes: Any, numbers: Any, distance: Any) -> tuple[Any, Any]:
    """Pack 32 float32 at `source`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        address, *places = arguments
        _pack(Emitter(builder), lambda emit, half: emit.load_floats(address, half), *places)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def pack_scaled(
    typing_context: Any, source: Any, weights: Any, factor: Any, codes: Any, numbers: Any, distance: Any
) -> tuple[Any, Any]:
    """Pack source · weights · factor, 32 float32 each and one."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        address, weight_address, factor_value, *places = arguments

        def values(emit: Emitter, half: int) -> Lanes:
            return emit.load_floats(address, half) * emit.splat(factor_value) * emit.load_floats(weight_address, half)

        _pack(Emitter(builder), values, *places)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, *[types.int64] * 3), generate


@intrinsic
def pack_gated(typing_context: Any, gate: Any, up: Any, codes: Any, numbers: Any, distance: Any) -> tuple[Any, Any]:
    """Pack silu(gate) · up, 32 float32 each."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        gate_address, up_address, *places = arguments

        def values(emit: Emitter, half: int) -> Lanes:
            return emit.silu(emit.load_floats(gate_address, half)) * emit.load_floats(up_address, half)

        _pack(Emitter(builder), values, *places)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@numba.njit(error_model="numpy")
def _pack_normed_row(source, weight, factor, columns, packed, row, height):
    num_groups = (columns + GROUP - 1) // GROUP
    for group in range(num_groups):
        codes, numbers = group_place(packed, row, group, num_groups, height)
        offset = group * GROUP * 4
        pack_scaled(source + offset, weight + offset, factor, codes, numbers, 4 * height)


def norm_pack(most_rows: int) -> Body:
    """Root-mean-square norm of a sum; arguments as of `normed_rows`."""
    return normed_rows(most_rows, _pack_normed_row)


def pack(most_rows: int) -> Body:
    """Arguments: source and its stride, columns, packed, which step number counts the rows."""

    def kernel(arguments, step, rank, size):
        source, stride, columns, packed, rows_at = read_arguments(arguments, 5)
        num_rows = int64s(step, 8)[rows_at]
        height = block_rows(num_rows, most_rows)
        num_groups = (columns + GROUP - 1) // GROUP
        row = claim(arguments)
        while row < num_rows:
            for group in range(num_groups):
                codes, numbers = group_place(packed, row, group, num_groups, height)
                pack_plain(source + row * stride + group * GROUP * 4, codes, numbers, 4 * height)
            row = claim(arguments)

    return kernel


def gate_pack(most_rows: int) -> Body:
    """silu(gate) · up of [gate, up] side by side.  Arguments as of `pack`; columns are those of one half."""

    def kernel(arguments, step, rank, size):
        source, stride, columns, packed, rows_at = read_arguments(arguments, 5)
        num_rows = int64s(step, 8)[rows_at]
        height = block_rows(num_rows, most_rows)
        num_groups = (columns + GROUP - 1) // GROUP
        num_chunks = (num_groups + _GATE_CHUNK - 1) // _GATE_CHUNK
        piece = claim(arguments)
        while piece < num_rows * num_chunks:
            row, first = piece // num_chunks, piece % num_chunks * _GATE_CHUNK
            for group in range(first, min(first + _GATE_CHUNK, num_groups)):
                codes, numbers = group_place(packed, row, group, num_groups, height)
                gate = source + row * stride + group * GROUP * 4
                pack_gated(gate, gate + columns * 4, codes, numbers, 4 * height)
            piece = claim(arguments)

    return kernel
