"""A tile of a matrix product: some rows of quantised activations times sixteen packed outputs.

Weights are `engine.layers.packed_weight.PackedMatrix`: groups of 32 inputs by 16 outputs, weight = scale · code +
minimum.  Activations are packed alike (`engine.cpu.pack_kernels`): per row and group, int8 codes, their scale, and
scale · sum of the codes.  So a group adds scale' · (scale · Σ code · code') + minimum · (scale' · Σ code'), where the
first sum is exact in 32 bits.  A symmetric matrix has a code that stands for zero instead of minimums: its sums start
from - zero · Σ code'.  A row's result depends on that row alone, whatever the number of rows and however
`engine.cpu.amx_tile` and this file share them: both round the same numbers in the same order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.activations import ACTIVATION_BYTES, EXACT, GROUP, SCALE, SCALED_SUM, START_4, START_8
from engine.cpu.amx_tile import MIN_AMX_ROWS, sum_with_amx
from engine.cpu.dot_products import dot_quads_of
from engine.cpu.lanes import FLOAT32, INT32, Emitter, Lanes, Loop
from engine.cpu.weight_record import QUADS, WeightRecord


@intrinsic(prefer_literal=True)
def matrix_tile(
    typing_context: Any,
    rows: Any,
    bits: Any,
    is_symmetric: Any,
    has_amx: Any,
    activations: Any,
    weights: Any,
    bias: Any,
    output: Any,
    output_stride: Any,
    num_groups: Any,
) -> tuple[Any, Any]:
    """Write `rows` by 16 float32 to `output`, whose rows lie `output_stride` bytes apart.

    `activations` is one block of rows, `weights` one tile, `bias` 16 float32.  The first four are constants.  Where
    `has_amx`, tiles of `MIN_AMX_ROWS` and more need `engine.cpu.amx_tile.open_amx` before and `close_amx` after.
    """
    num_rows, num_bits = rows.literal_value, bits.literal_value
    symmetric, by_amx = bool(is_symmetric.literal_value), bool(has_amx.literal_value) and num_rows >= MIN_AMX_ROWS

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        block, tile, bias_address, target, stride, count = arguments[4:]
        totals = [emit.load_floats(bias_address)] * num_rows
        record = WeightRecord(emit, num_bits, symmetric, tile)
        if by_amx:
            totals = sum_with_amx(emit, record, block, totals, count)
        else:
            totals = _sum(emit, record, block, totals, count)
        for total in totals:
            emit.store_floats(total, target)
            target = emit.at(target, stride)
        return context.get_dummy_value()

    return types.void(rows, bits, is_symmetric, has_amx, *[types.int64] * 6), generate


def _sum(emit: Emitter, record: WeightRecord, block: ir.Value, totals: list[Lanes], count: ir.Value) -> list[Lanes]:
    """The totals of all rows with `count` groups added, the first of which is `record`."""
    loop = Loop(emit, count, [block, record.address, *(total.value for total in totals)])
    block, address, *carried = loop.values
    record = replace(record, address=address)
    new_totals = _add_group(emit, record, block, [Lanes(emit, total) for total in carried])
    next_block = emit.at(block, len(totals) * ACTIVATION_BYTES)
    sums = loop.close([next_block, record.next_address, *(total.value for total in new_totals)])[2:]
    return [Lanes(emit, total) for total in sums]


def _add_group(emit: Emitter, record: WeightRecord, block: ir.Value, totals: list[Lanes]) -> list[Lanes]:
    """The totals of all rows with one group added.

    A sum is kept as the bits of a float32 that is larger by `EXACT`.  So it need not be converted: what comes of
    EXACT · scale is a float32 too, and is subtracted within the product with the scale.
    """
    num_rows = len(totals)
    record.prefetch()
    codes, scales = record.codes(), record.scales()
    minimums = None if record.is_symmetric else record.minimums()
    excess = scales * emit.floats(-EXACT)
    dot_quads = dot_quads_of(record.bits)

    def number(row: int, index: int, kind: ir.Type = FLOAT32) -> Lanes:
        return emit.load_splat(block, num_rows * (GROUP + 4 * index) + 4 * row, kind)

    sums = []
    for row, total in enumerate(totals):
        if record.is_symmetric:
            dots = number(row, START_4 if record.bits == 4 else START_8, INT32)
        else:
            dots = emit.floats(EXACT).as_int_bits()
        for quad in range(QUADS):
            dots = dot_quads(emit, dots, codes[quad], emit.load_splat(block, row * GROUP + 4 * quad, INT32))
        total = emit.fma(emit.fma(dots.as_float_bits(), scales, excess), number(row, SCALE), total)
        if minimums is not None:
            total = emit.fma(minimums, number(row, SCALED_SUM), total)
        sums.append(total)
    return sums
