"""The tall tiles of `engine.cpu.matrix_tile`, with the processor's unit for eight-bit matrices (Intel AMX).

The unit multiplies a whole group at once: up to 16 rows by 32 inputs by 16 outputs.  Its sums are exact and reach the
vector registers through memory, where they are scaled and added as the other tiles do it, to the same bits.  A
group's products are begun before those of the one before are added, which hides how long they take.  Used by
`engine.cpu.matrix_tile` and `engine.cpu.matrix_kernels`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.activations import ACTIVATION_BYTES, GROUP, LANES, SCALE, SCALED_SUM
from engine.cpu.lanes import BYTES, INT8, INT64, Emitter, Lanes, Loop
from engine.cpu.split_emit import on_stack, pointer
from engine.cpu.weight_record import QUADS, WeightRecord

MIN_AMX_ROWS = 16
"""The rows of a tile from which on this is faster."""

_SUMS, _ACTIVATIONS, _CODES = range(3)
"""Registers of the unit."""
_VECTOR_BYTES = 4 * LANES
_CONFIGURATION_NUMBERS = 8


@intrinsic(prefer_literal=True)
def open_amx(typing_context: Any, has_amx: Any, rows: Any) -> tuple[Any, Any]:
    """Prepare this thread's unit for tiles of `rows`; nothing where `has_amx`, a constant, is not set.

    For the layout see Intel's Software Developer's Manual, LDTILECFG: palette, then bytes per row of each register
    from byte 16 on, and rows from byte 48 on.
    """
    is_used = bool(has_amx.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        if not is_used:
            return context.get_dummy_value()
        emit = Emitter(builder)
        widths = _VECTOR_BYTES << (16 * _SUMS) | GROUP << (16 * _ACTIVATIONS) | _VECTOR_BYTES << (16 * _CODES)
        of_rows = builder.mul(arguments[1], INT64(1 << (8 * _SUMS) | 1 << (8 * _ACTIVATIONS)))
        heights = builder.or_(of_rows, INT64(QUADS << (8 * _CODES)))
        configuration = on_stack(emit, 8 * _CONFIGURATION_NUMBERS)
        for index, number in enumerate((INT64(1), INT64(0), INT64(widths), *[INT64(0)] * 3, heights, INT64(0))):
            emit.store(number, configuration, 8 * index)
        emit.call("llvm.x86.ldtilecfg", ir.VoidType(), pointer(emit, configuration))
        return context.get_dummy_value()

    return types.void(has_amx, types.int64), generate


@intrinsic(prefer_literal=True)
def close_amx(typing_context: Any, has_amx: Any) -> tuple[Any, Any]:
    """Leave the unit in its first state, so that nobody has to save what is in it."""
    is_used = bool(has_amx.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        if is_used:
            Emitter(builder).call("llvm.x86.tilerelease", ir.VoidType())
        return context.get_dummy_value()

    return types.void(has_amx), generate


def sum_with_amx(
    emit: Emitter, record: WeightRecord, block: ir.Value, totals: list[Lanes], count: ir.Value
) -> list[Lanes]:
    """The totals of all rows with `count` groups added, the first of which is `record`.

    While a group is added, the next one is multiplied and the codes of the one after are unpacked: the unit waits
    long for what was stored just before.
    """
    num_rows = len(totals)
    code_bytes, sum_bytes = QUADS * _VECTOR_BYTES, num_rows * _VECTOR_BYTES
    codes, sums = on_stack(emit, 2 * code_bytes), on_stack(emit, 2 * sum_bytes)
    places = [codes, emit.at(codes, code_bytes), sums, emit.at(sums, sum_bytes)]
    following = _advance(emit, record.address, record.next_address, INT64(1), count)
    _unpack(emit, record, codes)
    _unpack(emit, replace(record, address=following), places[1])
    _multiply(emit, record, block, num_rows, codes, sums)
    initial = [block, record.address, following, *places, *(total.value for total in totals)]
    loop = Loop(emit, count, initial)
    block, address, next_address, codes, next_codes, sums, next_sums, *carried = loop.values
    record, following = replace(record, address=address), replace(record, address=next_address)
    record.prefetch()
    next_block = _advance(emit, block, emit.at(block, num_rows * ACTIVATION_BYTES), loop.following_index, count)
    after = _advance(
        emit, next_address, following.next_address, emit.builder.add(loop.following_index, INT64(1)), count
    )
    _unpack(emit, replace(record, address=after), codes)
    _multiply(emit, following, next_block, num_rows, next_codes, next_sums)
    new_totals = _add_sums(emit, record, block, sums, [Lanes(emit, total) for total in carried])
    places = [next_codes, codes, next_sums, sums]
    ends = loop.close([next_block, next_address, after, *places, *(total.value for total in new_totals)])
    return [Lanes(emit, total) for total in ends[7:]]


def _advance(emit: Emitter, address: ir.Value, following: ir.Value, index: ir.Value, count: ir.Value) -> ir.Value:
    """`following`, the address of group `index`; there is nothing behind the last group, whose `address` stays."""
    return emit.builder.select(emit.builder.icmp_signed("<", index, count), following, address)


def _unpack(emit: Emitter, record: WeightRecord, codes: ir.Value) -> None:
    """Write the codes of a group as the unit takes them; not those that lie like that already."""
    if record.bits == 4 or record.is_symmetric:
        for quad, vector in enumerate(record.codes()):
            emit.store(_centred(emit, record, vector), codes, quad * _VECTOR_BYTES)


def _multiply(
    emit: Emitter, record: WeightRecord, block: ir.Value, num_rows: int, codes: ir.Value, sums: ir.Value
) -> None:
    """Write the sums of products of one group, whose codes are unpacked, to `sums`: int32 [rows, 16]."""
    if record.bits == 8 and not record.is_symmetric:
        codes = record.address
    product = "llvm.x86.tdpbssd" if record.is_symmetric else "llvm.x86.tdpbsud"
    emit.call("llvm.x86.tilezero", ir.VoidType(), INT8(_SUMS))
    _load_register(emit, _ACTIVATIONS, block, GROUP)
    _load_register(emit, _CODES, codes, _VECTOR_BYTES)
    emit.call(product, ir.VoidType(), INT8(_SUMS), INT8(_ACTIVATIONS), INT8(_CODES))
    emit.call("llvm.x86.tilestored64", ir.VoidType(), INT8(_SUMS), pointer(emit, sums), INT64(_VECTOR_BYTES))


def _centred(emit: Emitter, record: WeightRecord, codes: Lanes) -> ir.Value:
    """Codes of bytes; those of a symmetric matrix without what stands for zero, and signed."""
    if not record.is_symmetric:
        return codes.value
    zeros = ir.Constant(BYTES, [1 << (record.bits - 1)] * (4 * LANES))
    return emit.builder.sub(emit.builder.bitcast(codes.value, BYTES), zeros)


def _add_sums(emit: Emitter, record: WeightRecord, block: ir.Value, sums: ir.Value, totals: list[Lanes]) -> list[Lanes]:
    """The totals of all rows with the scaled sums of one group added."""
    num_rows = len(totals)
    scales = record.scales()
    minimums = None if record.is_symmetric else record.minimums()

    def number(row: int, index: int) -> Lanes:
        return emit.load_splat(block, num_rows * (GROUP + 4 * index) + 4 * row)

    added = []
    for row, total in enumerate(totals):
        dots = emit.load_ints(sums, row * _VECTOR_BYTES).to_float()
        total = emit.fma(dots * scales, number(row, SCALE), total)
        if minimums is not None:
            total = emit.fma(minimums, number(row, SCALED_SUM), total)
        added.append(total)
    return added


def _load_register(emit: Emitter, register: int, address: ir.Value, stride: int) -> None:
    emit.call("llvm.x86.tileloadd64", ir.VoidType(), INT8(register), pointer(emit, address), INT64(stride))
