"""A tile of a matrix product in split numbers: one or two blocks of sixteen rows times 32 outputs.

Activations are packed in blocks of sixteen rows and groups of 32 inputs, a square of high parts and one of low ones
each; weights are `engine.layers.packed_splits.SplitMatrix`.  A row's result depends on that row alone.  Used by
`engine.cpu.split_kernels`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.activations import LANES
from engine.cpu.gelu import gelu
from engine.cpu.lanes import INT64, Emitter, Loop
from engine.cpu.split_emit import load_square, multiply_squares, on_stack, split_pair, store_square
from engine.cpu.split_layout import GROUP_BYTES, ROW_BYTES, SQUARE_BYTES

_WIDTH = 2
_VECTOR_BYTES = 4 * LANES


@intrinsic(prefer_literal=True)
def split_tile(
    typing_context: Any,
    blocks: Any,
    has_gelu: Any,
    activations: Any,
    weights: Any,
    bias: Any,
    output: Any,
    output_stride: Any,
    num_groups: Any,
) -> tuple[Any, Any]:
    """The product of `blocks` (a constant) blocks of rows with two tiles of weights, plus 32 float32 at `bias`.

    Without `has_gelu`, a constant, `output` gets float32 rows, `output_stride` bytes apart, sixteen for each block.
    With it, their GELU as one group of packed activations for each block, `output_stride` bytes apart.
    Needs `engine.cpu.split_emit.open_squares` before.
    """
    num_blocks, is_packed = blocks.literal_value, bool(has_gelu.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        block, tile, bias_address, target, stride, count = arguments[2:]
        _sum(emit, num_blocks, block, tile, bias_address, count)
        if is_packed:
            _store_packed(emit, num_blocks, target, stride)
            return context.get_dummy_value()
        for row_block in range(num_blocks):
            for column in range(_WIDTH):
                store_square(emit, row_block * _WIDTH + column, emit.at(target, column * _VECTOR_BYTES), stride)
            target = emit.at(target, builder.mul(stride, INT64(LANES)))
        return context.get_dummy_value()

    return types.void(blocks, has_gelu, *[types.int64] * 6), generate


def _sum(emit: Emitter, num_blocks: int, block: ir.Value, tile: ir.Value, bias: ir.Value, count: ir.Value) -> None:
    """Leave the sums of block r and tile t in register 2 r + t.

    The parts are taken in an order in which each is loaded once: low · high, high · high, high · low.
    """
    lefts, rights = [4, 5][:num_blocks], [6, 7]
    group_bytes = emit.builder.mul(count, INT64(GROUP_BYTES))
    for row_block in range(num_blocks):
        for column in range(_WIDTH):
            load_square(emit, row_block * _WIDTH + column, emit.at(bias, column * _VECTOR_BYTES), 0)
    loop = Loop(emit, count, [block, tile])
    place, weight = loop.values
    blocks = [place if row == 0 else emit.at(place, group_bytes) for row in range(num_blocks)]
    tiles = [weight, emit.at(weight, group_bytes)]

    def load(registers: list[int], places: list[ir.Value], part: int) -> None:
        for register, address in zip(registers, places, strict=True):
            load_square(emit, register, emit.at(address, part * SQUARE_BYTES))

    def multiply() -> None:
        for row, left in enumerate(lefts):
            for column, right in enumerate(rights):
                multiply_squares(emit, row * _WIDTH + column, left, right)

    load(rights, tiles, 0)
    load(lefts, blocks, 1)
    multiply()
    load(lefts, blocks, 0)
    multiply()
    load(rights, tiles, 1)
    multiply()
    loop.close([emit.at(place, GROUP_BYTES), emit.at(weight, GROUP_BYTES)])


def _store_packed(emit: Emitter, num_blocks: int, target: ir.Value, stride: ir.Value) -> None:
    """The GELU of the sums, as a group of packed activations of each block."""
    sums = on_stack(emit, num_blocks * _WIDTH * SQUARE_BYTES)
    for register in range(num_blocks * _WIDTH):
        store_square(emit, register, emit.at(sums, register * SQUARE_BYTES))
    for row_block in range(num_blocks):
        rows = Loop(emit, INT64(LANES), [emit.at(sums, row_block * _WIDTH * SQUARE_BYTES), target])
        place, row_target = rows.values
        halves = [gelu(emit, emit.load_floats(place, part * SQUARE_BYTES)) for part in range(_WIDTH)]
        for part, pairs in enumerate(split_pair(emit, *halves)):
            emit.store(pairs.value, row_target, part * SQUARE_BYTES)
        rows.close([emit.at(place, ROW_BYTES), emit.at(row_target, ROW_BYTES)])
        target = emit.at(target, stride)
