"""Emitted code for numbers in two halves of bfloat16, and for the processor's unit that multiplies tiles of them (AMX).

The unit sums products of bfloat16 in float32, sixteen rows by sixteen outputs by 32 inputs at once.  A product of
float32 is three of its products, high · high + high · low + low · high, whose sum lacks low · low: 2^-16 of the product
at most.  Two numbers side by side in 32 bits are a pair; which two is free, as long as both factors agree, so pairs are
made of the same lane of two vectors.  Used by `engine.cpu.split_tile` and `engine.cpu.split_attention`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.activations import LANES
from engine.cpu.lanes import INT8, INT64, Emitter, Lanes
from engine.cpu.split_layout import ROW_BYTES

_HALF_UNIT = 0x8000
"""Half of the last place that bfloat16 keeps of a float32's bits: added before the rest is cut off, it rounds."""
_HIGH_BITS = 0xFFFF0000
_CONFIGURATION_NUMBERS = 8
_REGISTERS = 8


def split_pair(emit: Emitter, first: Lanes, second: Lanes) -> tuple[Lanes, Lanes]:
    """Two vectors of float32 as two of pairs: their high parts, and their low ones."""
    high_bits = [_rounded(emit, lanes) for lanes in (first, second)]
    rests = [lanes - bits.as_float_bits() for lanes, bits in zip((first, second), high_bits, strict=True)]
    low_bits = [_rounded(emit, rest) for rest in rests]
    return _joined(emit, *high_bits), _joined(emit, *low_bits)


def _rounded(emit: Emitter, lanes: Lanes) -> Lanes:
    """The bits of the nearest bfloat16, as the upper half of a float32's."""
    return (lanes.as_int_bits() + emit.ints(_HALF_UNIT)) & _HIGH_BITS


def _joined(emit: Emitter, first: Lanes, second: Lanes) -> Lanes:
    """The upper halves of two vectors' lanes: of `first` in the lower half, of `second` in the upper."""
    return Lanes(emit, emit.builder.or_((first >> 16).value, second.value))


def load_square(emit: Emitter, register: int, address: ir.Value, stride: ir.Value | int = ROW_BYTES) -> None:
    """Load sixteen rows of 64 bytes, `stride` bytes apart; 0 makes them all the same."""
    distance = INT64(stride) if isinstance(stride, int) else stride
    emit.call("llvm.x86.tileloadd64", ir.VoidType(), INT8(register), pointer(emit, address), distance)


def store_square(emit: Emitter, register: int, address: ir.Value, stride: ir.Value | int = ROW_BYTES) -> None:
    distance = INT64(stride) if isinstance(stride, int) else stride
    emit.call("llvm.x86.tilestored64", ir.VoidType(), INT8(register), pointer(emit, address), distance)


def clear_square(emit: Emitter, register: int) -> None:
    emit.call("llvm.x86.tilezero", ir.VoidType(), INT8(register))


def multiply_squares(emit: Emitter, total: int, left: int, right: int) -> None:
    """Add the product of two registers of pairs to one of float32."""
    emit.call("llvm.x86.tdpbf16ps", ir.VoidType(), INT8(total), INT8(left), INT8(right))


def on_stack(emit: Emitter, num_bytes: int) -> ir.Value:
    """The address of memory that the whole function has, at a cache line."""
    with emit.builder.goto_entry_block():
        memory = emit.builder.alloca(ir.ArrayType(INT8, num_bytes))
        memory.align = 4 * LANES
    return emit.builder.ptrtoint(memory, INT64)


def pointer(emit: Emitter, address: ir.Value) -> ir.Value:
    return emit.builder.inttoptr(address, INT8.as_pointer())


@intrinsic
def open_squares(typing_context: Any) -> tuple[Any, Any]:
    """Prepare this thread's unit: eight registers of sixteen rows of 64 bytes.

    For the layout see Intel's Software Developer's Manual, LDTILECFG: palette, then bytes per row of each register
    from byte 16 on, and rows from byte 48 on.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        widths = sum(ROW_BYTES << (16 * register) for register in range(4))
        heights = sum(LANES << (8 * register) for register in range(_REGISTERS))
        configuration = on_stack(emit, 8 * _CONFIGURATION_NUMBERS)
        for index, number in enumerate((1, 0, widths, widths, 0, 0, heights, 0)):
            emit.store(INT64(number), configuration, 8 * index)
        emit.call("llvm.x86.ldtilecfg", ir.VoidType(), pointer(emit, configuration))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def close_squares(typing_context: Any) -> tuple[Any, Any]:
    """Leave the unit in its first state, so that nobody has to save what is in it."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        Emitter(builder).call("llvm.x86.tilerelease", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate
