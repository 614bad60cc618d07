"""The root-mean-square norm before a product, but for how its rows are packed.

`engine.cpu.pack_kernels` and `engine.cpu.float_kernels` say that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.activations import LANES
from engine.cpu.kernel import Body
from engine.cpu.lanes import FLOATS, Emitter, Lanes, Loop
from engine.cpu.memory import claim, float32s, int64s, read_arguments
from engine.cpu.row_blocks import block_rows

_VECTOR_BYTES = 4 * LANES


def normed_rows(most_rows: int, pack_row: Callable[..., None]) -> Body:
    """Arguments: hidden and residual with their strides, their sum and its stride, norm weight, epsilon as float32
    bits, columns, packed, which step number counts the rows.

    `pack_row(source, weight, factor, columns, packed, row, height)` is compiled; it packs source · weight · factor as
    a row of blocks of `height` rows.  The buffers' rows are padded to 16 columns with zeros, which the mean leaves out.
    """

    def kernel(arguments, step, rank, size):
        numbers = read_arguments(arguments, 11)
        hidden, hidden_stride, residual, residual_stride, total, total_stride = numbers[:6]
        weight, _, columns, packed, rows_at = numbers[6:]
        eps = float32s(arguments + 8 * 8, 1)[0]
        num_rows = int64s(step, 8)[rows_at]
        height = block_rows(num_rows, most_rows)
        num_vectors = (columns + LANES - 1) // LANES
        row = claim(arguments)
        while row < num_rows:
            source = total + row * total_stride
            left, right = hidden + row * hidden_stride, residual + row * residual_stride
            squares = _add_and_square(left, right, source, num_vectors)
            factor = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(columns) + eps))
            pack_row(source, weight, factor, columns, packed, row, height)
            row = claim(arguments)

    return kernel


@intrinsic
def _add_and_square(typing_context: Any, left: Any, right: Any, total: Any, num_vectors: Any) -> tuple[Any, Any]:
    """Write left + right to `total`, 16 · `num_vectors` float32 each; returns the sum of its squares."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        loop = Loop(emit, arguments[3], [*arguments[:3], ir.Constant(FLOATS, [0.0] * LANES)])
        left_place, right_place, place, squares = loop.values
        value = emit.load_floats(left_place) + emit.load_floats(right_place)
        emit.store_floats(value, place)
        following = [emit.at(address, _VECTOR_BYTES) for address in (left_place, right_place, place)]
        squares = loop.close([*following, (value * value + Lanes(emit, squares)).value])[3]
        return Lanes(emit, squares).sum()

    return types.float32(*[types.int64] * 4), generate
