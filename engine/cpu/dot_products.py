"""Sums of products of eight-bit numbers, in whatever way this processor has for them.

Each adds to sixteen int32 the products of four unsigned codes and four signed activations per lane.  Used by
`engine.cpu.matrix_tile`.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from engine.cpu.activations import LANES
from engine.cpu.isa import host_isa
from engine.cpu.lanes import BYTES, INT8, INT16, INT32, INTS, Emitter, Lanes

DotQuads = Callable[[Emitter, Lanes, Lanes, Lanes], Lanes]


def dot_quads_of(bits: int) -> DotQuads:
    """How this processor sums products with codes of so many bits."""
    isa = host_isa()
    assert isa is not None, "this processor is not served"
    if bits == 8 and isa.dot_product == "maddubs":
        return _dot_widening  # pairs of products overflow 16 bits
    return _DOT_QUADS[isa.dot_product]


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
