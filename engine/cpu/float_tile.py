"""A tile of a matrix product with floats: some rows of float32 activations times sixteen outputs, or several sixteens.

Weights are `engine.layers.packed_floats.FloatMatrix`: sixteen outputs side by side per input, in any of three
formats that become float32 without loss.  Activations are packed in blocks of rows (`engine.cpu.row_blocks`) and
groups of sixteen inputs: a row's inputs of a group lie side by side, then the next row's.  Every output is one sum
in the order of the inputs, each product fused with its addition, so a row's result depends on that row alone.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.activations import FLOAT_ACTIVATION_BYTES as ACTIVATION_BYTES
from engine.cpu.activations import FLOAT_GROUP as GROUP
from engine.cpu.activations import LANES
from engine.cpu.lanes import FLOAT16, FLOAT32, FLOATS, INT16, INT32, Emitter, Lanes, Loop
from engine.cpu.weight_record import PREFETCH_BYTES
from engine.layers.packed_floats import FLOAT_DTYPES

_FLOAT16, _BFLOAT16 = FLOAT_DTYPES.index(torch.float16), FLOAT_DTYPES.index(torch.bfloat16)
"""Kernels know a format by its place in `FLOAT_DTYPES`."""
_LINE_BYTES = 64


def vector_bytes(number_format: int) -> int:
    """What sixteen weights take."""
    return LANES * FLOAT_DTYPES[number_format].itemsize


def tiles_at_once(rows: int, most_rows: int) -> int:
    """How many sixteens of outputs a tile of `rows` has, where a block has at most `most_rows`.

    Few rows times few outputs would wait for each addition before the next; many do not fit in registers.
    """
    return max(1, min(4, max(4, most_rows // 2) // rows))


@intrinsic(prefer_literal=True)
def float_tile(
    typing_context: Any,
    rows: Any,
    tiles: Any,
    number_format: Any,
    activations: Any,
    weights: Any,
    tile_stride: Any,
    bias: Any,
    output: Any,
    output_stride: Any,
    num_groups: Any,
) -> tuple[Any, Any]:
    """Write `rows` by 16 `tiles` (constants) float32 to `output`, whose rows lie `output_stride` bytes apart.

    `activations` is one block of rows; `weights` the first tile, in a constant format, the others lie `tile_stride`
    bytes apart; `bias` is 16 `tiles` float32.
    """
    num_rows, num_tiles, kind = rows.literal_value, tiles.literal_value, number_format.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        block, tile, stride, bias_address, target, target_stride, count = arguments[3:]
        places = [tile]
        for _ in range(1, num_tiles):
            places.append(builder.add(places[-1], stride))
        firsts = [emit.load_floats(bias_address, 4 * LANES * index).value for index in range(num_tiles)]
        loop = Loop(emit, count, [block, *places, *firsts * num_rows])
        block, places, values = loop.values[0], loop.values[1 : 1 + num_tiles], loop.values[1 + num_tiles :]
        for place in places:
            for line in range(0, GROUP * vector_bytes(kind), _LINE_BYTES):
                emit.prefetch(place, PREFETCH_BYTES + line)
        for index in range(GROUP):
            values = _add_input(emit, kind, index, block, places, values)
        next_block = emit.at(block, num_rows * ACTIVATION_BYTES)
        next_places = [emit.at(place, GROUP * vector_bytes(kind)) for place in places]
        values = loop.close([next_block, *next_places, *values])[1 + num_tiles :]
        for row in range(num_rows):
            for index in range(num_tiles):
                emit.store(values[row * num_tiles + index], target, 4 * LANES * index)
            target = emit.at(target, target_stride)
        return context.get_dummy_value()

    return types.void(rows, tiles, number_format, *[types.int64] * 7), generate


def _add_input(
    emit: Emitter, kind: int, index: int, block: ir.Value, places: list[ir.Value], totals: list[ir.Value]
) -> list[ir.Value]:
    """The totals of all rows and tiles with one input of a group added."""
    num_tiles = len(places)
    weights = [_load_weights(emit, kind, place, index * vector_bytes(kind)) for place in places]
    sums = []
    for number, total in enumerate(totals):
        row, tile = divmod(number, num_tiles)
        activation = emit.load_splat(block, row * ACTIVATION_BYTES + 4 * index)
        # An instruction of its own, not left to the compiler: all heights of tiles must round alike.
        sums.append(emit.call("llvm.fma.v16f32", FLOATS, activation.value, weights[tile].value, total))
    return sums


def _load_weights(emit: Emitter, kind: int, place: ir.Value, offset: int) -> Lanes:
    if kind == _FLOAT16:
        return emit.load_halves(place, offset)
    return emit.load_bfloats(place, offset) if kind == _BFLOAT16 else emit.load_floats(place, offset)


@intrinsic(prefer_literal=True)
def load_number(typing_context: Any, number_format: Any, address: Any) -> tuple[Any, Any]:
    """One number of a constant format as float32."""
    kind = number_format.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit, address = Emitter(builder), arguments[1]
        if kind == _FLOAT16:
            return builder.fpext(emit.load(address, 0, FLOAT16), FLOAT32)
        if kind == _BFLOAT16:
            bits = builder.zext(emit.load(address, 0, INT16), INT32)
            return builder.bitcast(builder.shl(bits, INT32(16)), FLOAT32)
        return emit.load(address, 0, FLOAT32)

    return types.float32(number_format, types.int64), generate
