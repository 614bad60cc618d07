"""A tile of a matrix product: some rows of quantised activations times sixteen packed outputs.

Weights are `engine.layers.packed_weight.PackedMatrix`: groups of 32 inputs by 16 outputs, weight = scale · code +
minimum.  Activations are packed alike (`engine.cpu.pack_kernels`): per row and group, int8 codes, their scale, and
scale · sum of the codes.  So a group adds scale · scale' · Σ code · code' + minimum · (scale' · Σ code'), where the
first sum is exact in 32 bits.  A row's result depends on that row alone, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.activations import ACTIVATION_BYTES, GROUP, LANES
from engine.cpu.isa import host_isa
from engine.cpu.lanes import BYTES, INT8, INT16, INT32, INTS, Emitter, Lanes, Loop

QUADS = GROUP // 4

PREFETCH_BYTES = 4096
"""How far ahead weights are fetched: reading them is what a decode step waits for, and the processor's own
prefetcher reaches two thirds of what this does (docs/log.md, 2026-11-21)."""
_LINE_BYTES = 64

DotQuads = Callable[[Emitter, Lanes, Lanes, Lanes], Lanes]


def weight_bytes(bits: int) -> int:
    """What a group takes of one tile of weights: codes, scales and minimums."""
    return LANES * (GROUP * bits // 8 + 2 + 2)


@intrinsic(prefer_literal=True)
def matrix_tile(
    typing_context: Any,
    rows: Any,
    bits: Any,
    activations: Any,
    weights: Any,
    bias: Any,
    output: Any,
    output_stride: Any,
    num_groups: Any,
) -> tuple[Any, Any]:
    """Write `rows` (a constant) by 16 float32 to `output`, whose rows lie `output_stride` bytes apart.

    `activations` is one block of rows, `weights` one tile of `bits` (a constant), `bias` 16 float32.
    """
    num_rows, num_bits = rows.literal_value, bits.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        block, tile, bias_address, target, stride, count = arguments[2:]
        first = emit.load_floats(bias_address).value
        loop = Loop(emit, count, [block, tile, *[first] * num_rows])
        block, tile, *totals = loop.values
        new_totals = _add_group(emit, num_bits, block, tile, [Lanes(emit, total) for total in totals])
        next_block = emit.at(block, num_rows * ACTIVATION_BYTES)
        totals = loop.close([next_block, emit.at(tile, weight_bytes(num_bits)), *[t.value for t in new_totals]])[2:]
        for total in totals:
            emit.store(total, target)
            target = emit.at(target, stride)
        return context.get_dummy_value()

    return types.void(rows, bits, *[types.int64] * 6), generate


def _add_group(emit: Emitter, bits: int, block: ir.Value, tile: ir.Value, totals: list[Lanes]) -> list[Lanes]:
    """The totals of all rows with one group added."""
    num_rows = len(totals)
    for line in range(0, weight_bytes(bits), _LINE_BYTES):
        emit.prefetch(tile, PREFETCH_BYTES + line)
    codes = _load_codes(emit, bits, tile)
    scale = emit.load_halves(tile, LANES * GROUP * bits // 8)
    minimum = emit.load_halves(tile, LANES * (GROUP * bits // 8 + 2))
    dot_quads = _dot_quads_of(bits)
    sums = []
    for row, total in enumerate(totals):
        dots = emit.ints(0)
        for quad in range(QUADS):
            dots = dot_quads(emit, dots, codes[quad], emit.load_splat(block, row * GROUP + 4 * quad, INT32))
        row_scale = emit.load_splat(block, num_rows * GROUP + 4 * row)
        row_sum = emit.load_splat(block, num_rows * (GROUP + 4) + 4 * row)
        sums.append(minimum * row_sum + (scale * row_scale * dots.to_float() + total))
    return sums


def _dot_quads_of(bits: int) -> DotQuads:
    isa = host_isa()
    assert isa is not None, "this processor is not served"
    if bits == 8 and isa.dot_product == "maddubs":
        return _dot_widening  # pairs of products overflow 16 bits
    return _DOT_QUADS[isa.dot_product]


def _load_codes(emit: Emitter, bits: int, tile: ir.Value) -> list[Lanes]:
    """The codes of a group, four bytes per lane: one vector for each four inputs."""
    if bits == 8:
        return [emit.load_ints(tile, 4 * LANES * quad) for quad in range(QUADS)]
    packed = [emit.load_ints(tile, 4 * LANES * quad) for quad in range(QUADS // 2)]
    return [both & 0x0F0F0F0F for both in packed] + [(both >> 4) & 0x0F0F0F0F for both in packed]


def _dot_vnni512(emit: Emitter, sums: Lanes, codes: Lanes, activations: Lanes) -> Lanes:
    name = "llvm.x86.avx512.vpdpbusd.512"
    return Lanes(emit, emit.call(name, INTS, sums.value, codes.value, activations.value))


def _dot_vnni256(emit: Emitter, sums: Lanes, codes: Lanes, activations: Lanes) -> Lanes:
    half = ir.VectorType(INT32, LANES // 2)

    def dot(parts: list[ir.Value]) -> ir.Value:
        return emit.call("llvm.x86.avx512.vpdpbusd.256", half, *parts)

    return _by_parts(emit, 2, dot, sums, codes, activations)


def _dot_maddubs(emit: Emitter, sums: Lanes, codes: Lanes, activations: Lanes) -> Lanes:
    """Pairs of products in 16 bits, which hold those of 4-bit codes; then pairs of pairs."""
    bytes_, shorts, ints = (ir.VectorType(kind, n) for kind, n in ((INT8, 32), (INT16, 16), (INT32, 8)))
    ones = ir.Constant(shorts, [1] * 16)

    def dot(parts: list[ir.Value]) -> ir.Value:
        left, right = (emit.builder.bitcast(part, bytes_) for part in parts[1:])
        pairs = emit.call("llvm.x86.avx2.pmadd.ub.sw", shorts, left, right)
        return emit.builder.add(parts[0], emit.call("llvm.x86.avx2.pmadd.wd", ints, pairs, ones))

    return _by_parts(emit, 2, dot, sums, codes, activations)


def _dot_usdot(emit: Emitter, sums: Lanes, codes: Lanes, activations: Lanes) -> Lanes:
    bytes_, ints = ir.VectorType(INT8, 16), ir.VectorType(INT32, 4)

    def dot(parts: list[ir.Value]) -> ir.Value:
        left, right = (emit.builder.bitcast(part, bytes_) for part in parts[1:])
        return emit.call("llvm.aarch64.neon.usdot.v4i32.v16i8", ints, parts[0], left, right)

    return _by_parts(emit, 4, dot, sums, codes, activations)


def _dot_widening(emit: Emitter, sums: Lanes, codes: Lanes, activations: Lanes) -> Lanes:
    """In plain LLVM: 16-bit products, which hold 255 · 127, summed in 32 bits."""
    builder = emit.builder
    shorts, ints = ir.VectorType(INT16, 4 * LANES), ir.VectorType(INT32, 4 * LANES)
    left = builder.zext(builder.bitcast(codes.value, BYTES), shorts)
    right = builder.sext(builder.bitcast(activations.value, BYTES), shorts)
    products = builder.sext(builder.mul(left, right), ints)
    undefined = ir.Constant(ints, ir.Undefined)
    for part in range(4):
        order = ir.Constant(INTS, [4 * lane + part for lane in range(LANES)])
        sums = sums + Lanes(emit, builder.shuffle_vector(products, undefined, order))
    return sums


def _by_parts(emit: Emitter, num_parts: int, dot: Callable[[list[ir.Value]], ir.Value], *operands: Lanes) -> Lanes:
    """Split the lanes of all operands, apply `dot` to each part, and join the results."""
    builder = emit.builder
    undefined = ir.Constant(INTS, ir.Undefined)
    width = LANES // num_parts
    results = []
    for part in range(num_parts):
        order = ir.Constant(ir.VectorType(INT32, width), list(range(part * width, (part + 1) * width)))
        results.append(dot([builder.shuffle_vector(operand.value, undefined, order) for operand in operands]))
    while len(results) > 1:
        width *= 2
        order = ir.Constant(ir.VectorType(INT32, width), list(range(width)))
        results = [
            builder.shuffle_vector(low, high, order) for low, high in zip(results[::2], results[1::2], strict=True)
        ]
    return Lanes(emit, results[0])


_DOT_QUADS: dict[str, DotQuads] = {
    "vnni512": _dot_vnni512,
    "vnni256": _dot_vnni256,
    "maddubs": _dot_maddubs,
    "usdot": _dot_usdot,
    "widening": _dot_widening,
}
