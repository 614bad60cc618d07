"""What kernels need of memory and threads beyond plain numba: raw addresses, counters, waiting.

Kernels get addresses as int64 and see them as arrays; sizes are the caller's promise.
"""

from __future__ import annotations

import sys
from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from engine.cpu.lanes import FLOAT16, FLOAT32, INT64, Emitter

_Typing = tuple[Any, Any]


def _pointer_to(kind: types.Type) -> Any:
    @intrinsic
    def pointer(typing_context: Any, address: Any) -> _Typing:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


_int64_pointer = _pointer_to(types.int64)
_int32_pointer = _pointer_to(types.int32)
_uint8_pointer = _pointer_to(types.uint8)
_float32_pointer = _pointer_to(types.float32)


@njit
def int64s(address, count):
    """int64 [count] at `address`."""
    return carray(_int64_pointer(address), count)


@njit
def int32s(address, count):
    """int32 [count] at `address`."""
    return carray(_int32_pointer(address), count)


@njit
def uint8s(address, count):
    """uint8 [count] at `address`."""
    return carray(_uint8_pointer(address), count)


@njit
def float32s(address, count):
    """float32 [count] at `address`."""
    return carray(_float32_pointer(address), count)


@intrinsic(prefer_literal=True)
def read_arguments(typing_context: Any, arguments: Any, count: Any) -> _Typing:
    """The first `count` (a constant) int64 of an instruction's arguments, behind the work counter, as a tuple."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        base = builder.inttoptr(values[0], INT64.as_pointer())
        places = (builder.gep(base, [INT64(index + 1)]) for index in range(signature.return_type.count))
        return context.make_tuple(builder, signature.return_type, [builder.load(place) for place in places])

    return types.UniTuple(types.int64, count.literal_value)(types.int64, count), generate


@intrinsic
def load_half(typing_context: Any, address: Any) -> _Typing:
    """The float16 at `address` as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(builder.inttoptr(arguments[0], FLOAT16.as_pointer()))
        return builder.fpext(value, FLOAT32)

    return types.float32(types.int64), generate


@intrinsic
def fetch_add(typing_context: Any, address: Any, amount: Any) -> _Typing:
    """Add to the int64 at `address`, in one order for all threads; returns what was there before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@njit
def claim(arguments):
    """The number of the next piece of an instruction's work: 0, 1, ... over all threads."""
    return fetch_add(arguments, 1)


@intrinsic
def compare_exchange(typing_context: Any, address: Any, expected: Any, value: Any) -> _Typing:
    """Put `value` in place of the int64 at `address` if it is `expected`, in one order for all threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], INT64.as_pointer())
        builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def load_shared(typing_context: Any, address: Any) -> _Typing:
    """The int64 at `address`, in one order for all threads; what its writer wrote before is visible too."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], INT64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def read_cycles(typing_context: Any) -> _Typing:
    """The processor's cycle counter."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return Emitter(builder).call("llvm.readcyclecounter", INT64)

    return types.int64(), generate


@intrinsic
def call_kernel(typing_context: Any, kernel: Any, arguments: Any, step: Any, rank: Any, size: Any) -> _Typing:
    """Call the kernel at an address; see `engine.cpu.kernel`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [INT64] * 4)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


give_way = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.intc())
"""Let another thread run on this processor."""
