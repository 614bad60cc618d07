"""Where rows of activations lie before a product of an encoder, in either of two kinds, and how 32 of them are written.

Rows are packed in blocks and groups of 32 inputs.  Where the processor multiplies split numbers
(`engine.cpu.split_emit`), a block has sixteen rows, and a group's high parts lie before its low ones; else a group is
two of float32 (`engine.cpu.float_tile`), and blocks are as high as `engine.cpu.row_blocks` says.  Used by the kernels
that feed those products.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.activations import LANES
from engine.cpu.lanes import Emitter, Lanes
from engine.cpu.row_blocks import block_rows
from engine.cpu.split_emit import split_pair
from engine.cpu.split_layout import ROW_BYTES

GROUP = 2 * LANES
_VECTOR_BYTES = 4 * LANES


@numba.njit(error_model="numpy")
def packed_height(num_rows, is_split, most_rows):
    """The height of the blocks of a step of `num_rows`."""
    return LANES if is_split else block_rows(num_rows, most_rows)


@numba.njit(error_model="numpy")
def packed_place(packed, row, group, num_groups, height):
    """The address of the first of two vectors of a row's group; the other lies 64 · height bytes further."""
    return packed + ((row // height * num_groups + group) * 2 * height + row % height) * ROW_BYTES


@intrinsic(prefer_literal=True)
def write_normed(
    typing_context: Any, is_split: Any, row: Any, factor: Any, weight: Any, bias: Any, place: Any, distance: Any
) -> tuple[Any, Any]:
    """Replace 32 float32 at `row` by row · factor · weight + bias, and pack them; `is_split` is a constant."""
    splits = bool(is_split.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        source, factor_value, weights, biases, target, gap = arguments[1:]
        factors = emit.splat(factor_value)
        halves = []
        for offset in (0, _VECTOR_BYTES):
            scaled = emit.load_floats(source, offset) * factors
            value = emit.fma(scaled, emit.load_floats(weights, offset), emit.load_floats(biases, offset))
            emit.store_floats(value, source, offset)
            halves.append(value)
        write_halves(emit, splits, halves, target, gap)
        return context.get_dummy_value()

    return types.void(is_split, types.int64, types.float32, *[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def write_scaled(
    typing_context: Any, is_split: Any, source: Any, factor: Any, place: Any, distance: Any
) -> tuple[Any, Any]:
    """Pack 32 float32 at `source`, times a factor."""
    splits = bool(is_split.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        address, factor_value, target, gap = arguments[1:]
        factors = emit.splat(factor_value)
        halves = [emit.load_floats(address, offset) * factors for offset in (0, _VECTOR_BYTES)]
        write_halves(emit, splits, halves, target, gap)
        return context.get_dummy_value()

    return types.void(is_split, types.int64, types.float32, types.int64, types.int64), generate


def write_halves(emit: Emitter, is_split: bool, halves: list[Lanes], place: ir.Value, distance: ir.Value) -> None:
    """Store 32 float32 as a group of packed activations has them."""
    stored = split_pair(emit, *halves) if is_split else halves
    emit.store(stored[0].value, place)
    emit.store(stored[1].value, emit.at(place, distance))
