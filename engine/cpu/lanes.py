"""Vectors of sixteen lanes for hand-written inner loops: a thin layer over llvmlite's IR builder.

numba compiles plain loops well, but it has no vector types, and a matrix tile needs its operands kept in
registers.  Such tiles are emitted with these classes, inside numba intrinsics.  Sixteen lanes are one
AVX-512 register; LLVM splits them for narrower processors.  Knows no layout and no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from engine.cpu.activations import LANES

INT8, INT16, INT32, INT64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT16, FLOAT32 = ir.HalfType(), ir.FloatType()
BYTES = ir.VectorType(INT8, 4 * LANES)
SHORTS = ir.VectorType(INT16, LANES)
HALVES = ir.VectorType(FLOAT16, LANES)
INTS = ir.VectorType(INT32, LANES)
FLOATS = ir.VectorType(FLOAT32, LANES)
# Lets LLVM fuse a product and the sum it goes into; nothing else is loosened.
_CONTRACT = ("contract",)


class Lanes:
    """Sixteen numbers in a register, float32 or int32, with the operators of such numbers."""

    __slots__ = ("emit", "value")

    def __init__(self, emit: Emitter, value: ir.Value) -> None:
        self.emit = emit
        self.value = value

    def __add__(self, other: Lanes) -> Lanes:
        builder = self.emit.builder
        if self.is_float:
            return self._with(builder.fadd(self.value, other.value, flags=_CONTRACT))
        return self._with(builder.add(self.value, other.value))

    def __sub__(self, other: Lanes) -> Lanes:
        builder = self.emit.builder
        if self.is_float:
            return self._with(builder.fsub(self.value, other.value, flags=_CONTRACT))
        return self._with(builder.sub(self.value, other.value))

    def __mul__(self, other: Lanes) -> Lanes:
        builder = self.emit.builder
        if self.is_float:
            return self._with(builder.fmul(self.value, other.value, flags=_CONTRACT))
        return self._with(builder.mul(self.value, other.value))

    def __truediv__(self, other: Lanes) -> Lanes:
        return self._with(self.emit.builder.fdiv(self.value, other.value))

    def __and__(self, mask: int) -> Lanes:
        return self._with(self.emit.builder.and_(self.value, self.emit.ints(mask).value))

    def __rshift__(self, bits: int) -> Lanes:
        return self._with(self.emit.builder.lshr(self.value, self.emit.ints(bits).value))

    def __lshift__(self, bits: int) -> Lanes:
        return self._with(self.emit.builder.shl(self.value, self.emit.ints(bits).value))

    @property
    def is_float(self) -> bool:
        return bool(self.value.type.element == FLOAT32)

    def to_float(self) -> Lanes:
        """int32 as float32."""
        return self._with(self.emit.builder.sitofp(self.value, FLOATS))

    def to_int(self) -> Lanes:
        """float32 as int32, towards zero; in range, or the lane means nothing."""
        return self._with(self.emit.builder.fptosi(self.value, INTS))

    def as_float_bits(self) -> Lanes:
        """int32 bit patterns as the float32 they stand for."""
        return self._with(self.emit.builder.bitcast(self.value, FLOATS))

    def as_int_bits(self) -> Lanes:
        """float32 as the int32 of its bits."""
        return self._with(self.emit.builder.bitcast(self.value, INTS))

    def rounded(self) -> Lanes:
        """To the nearest whole float32, ties to even."""
        return self._with(self.emit.call("llvm.rint.v16f32", FLOATS, self.value))

    def maximum(self, other: Lanes) -> Lanes:
        return self._with(self.emit.call("llvm.maxnum.v16f32", FLOATS, self.value, other.value))

    def minimum(self, other: Lanes) -> Lanes:
        return self._with(self.emit.call("llvm.minnum.v16f32", FLOATS, self.value, other.value))

    def magnitude(self) -> Lanes:
        return self._with(self.emit.call("llvm.fabs.v16f32", FLOATS, self.value))

    def sum(self) -> ir.Value:
        """The sum of the lanes, halves first: always in the same order."""
        return self._reduce(lambda low, high: low + high)

    def largest(self) -> ir.Value:
        return self._reduce(lambda low, high: low.maximum(high))

    def _reduce(self, combine) -> ir.Value:
        folded = self
        width = LANES // 2
        while width:
            order = [lane ^ width for lane in range(LANES)]
            folded = combine(folded, folded.shuffled(order))
            width //= 2
        return self.emit.builder.extract_element(folded.value, INT32(0))

    def shuffled(self, order: Sequence[int]) -> Lanes:
        return self.merged(Lanes(self.emit, ir.Constant(self.value.type, ir.Undefined)), order)

    def merged(self, other: Lanes, order: Sequence[int]) -> Lanes:
        """The lanes that `order` names: those of `other` count from 16 on."""
        mask = ir.Constant(ir.VectorType(INT32, LANES), list(order))
        return self._with(self.emit.builder.shuffle_vector(self.value, other.value, mask))

    def _with(self, value: ir.Value) -> Lanes:
        return Lanes(self.emit, value)


class Emitter:
    """Loads, stores, constants and calls at the builder's position.  Addresses are int64 values."""

    __slots__ = ("builder",)

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def at(self, address: ir.Value, offset: int | ir.Value) -> ir.Value:
        """The address `offset` bytes further."""
        if isinstance(offset, int):
            if offset == 0:
                return address
            offset = INT64(offset)
        return self.builder.add(address, offset)

    def load(self, address: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
        """One value of type `kind`, which need not be aligned."""
        pointer = self.builder.inttoptr(self.at(address, offset), kind.as_pointer())
        value = self.builder.load(pointer)
        value.align = 1
        return value

    def store(self, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
        pointer = self.builder.inttoptr(self.at(address, offset), value.type.as_pointer())
        self.builder.store(value, pointer, align=1)

    def load_floats(self, address: ir.Value, offset: int = 0) -> Lanes:
        return Lanes(self, self.load(address, offset, FLOATS))

    def load_halves(self, address: ir.Value, offset: int = 0) -> Lanes:
        """Sixteen float16 as float32."""
        return Lanes(self, self.builder.fpext(self.load(address, offset, HALVES), FLOATS))

    def load_bfloats(self, address: ir.Value, offset: int = 0) -> Lanes:
        """Sixteen bfloat16 as float32."""
        shorts = self.load(address, offset, SHORTS)
        return (Lanes(self, self.builder.zext(shorts, INTS)) << 16).as_float_bits()

    def load_ints(self, address: ir.Value, offset: int = 0) -> Lanes:
        return Lanes(self, self.load(address, offset, INTS))

    def store_floats(self, lanes: Lanes, address: ir.Value, offset: int = 0) -> None:
        self.store(lanes.value, address, offset)

    def prefetch(self, address: ir.Value, offset: int) -> None:
        """Fetch a cache line to the second-level cache; any address will do."""
        pointer = self.builder.inttoptr(self.at(address, offset), INT8.as_pointer())
        for_reading, second_level, data = INT32(0), INT32(2), INT32(1)
        self.call("llvm.prefetch.p0i8", ir.VoidType(), pointer, for_reading, second_level, data)

    def floats(self, number: float) -> Lanes:
        return Lanes(self, ir.Constant(FLOATS, [number] * LANES))

    def fma(self, left: Lanes, right: Lanes, added: Lanes) -> Lanes:
        """left · right + added of floats, rounded once."""
        return Lanes(self, self.call("llvm.fma.v16f32", FLOATS, left.value, right.value, added.value))

    def ints(self, number: int) -> Lanes:
        return Lanes(self, ir.Constant(INTS, [number] * LANES))

    def splat(self, scalar: ir.Value) -> Lanes:
        """A float32 or int32 value in every lane."""
        kind = FLOATS if scalar.type == FLOAT32 else INTS
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, INT32(0))
        return Lanes(self, self.builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES)))

    def load_splat(self, address: ir.Value, offset: int, kind: ir.Type = FLOAT32) -> Lanes:
        """One float32 or int32 from memory in every lane."""
        return self.splat(self.load(address, offset, kind))

    def call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        """Call an LLVM intrinsic by name."""
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, [argument.type for argument in arguments])
            function = ir.Function(module, kind, name)
        return self.builder.call(function, arguments)

    def exp(self, exponents: Lanes) -> Lanes:
        """e to the power of each lane, to about 2 units in the last place; 0 below -87.

        exp(x) = 2^n · e^r with n = round(x / ln 2) and |r| <= ln 2 / 2, which is x - n · ln 2 in two steps (Cody and
        Waite 1980); e^r is its Taylor polynomial of degree 6.  Lanes above 88 are taken as 88.
        """
        confined = exponents.maximum(self.floats(-87.0)).minimum(self.floats(88.0))
        whole = (confined * self.floats(1.4426950408889634)).rounded()
        rest = confined - whole * self.floats(0.693359375) - whole * self.floats(-2.12194440e-4)
        result = self.floats(1 / 720)
        for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
            result = result * rest + self.floats(coefficient)
        power = ((whole.to_int() + self.ints(127)) << 23).as_float_bits()
        is_tiny = self.builder.fcmp_ordered("<", exponents.value, self.floats(-87.0).value)
        return Lanes(self, self.builder.select(is_tiny, self.floats(0.0).value, (result * power).value))

    def silu(self, lanes: Lanes) -> Lanes:
        """x / (1 + exp(-x))."""
        return lanes / (self.exp(self.floats(0.0) - lanes) + self.floats(1.0))


class Loop:
    """A counted loop around emitted code, whose carried values stay in registers.

    loop = Loop(emit, count, [first_address, total])   # count >= 1
    address, total = loop.values
    ...
    totals = loop.close([next_address, next_total])
    """

    def __init__(self, emit: Emitter, count: ir.Value, initial: Sequence[ir.Value]) -> None:
        builder = emit.builder
        self._builder = builder
        self._count = count
        before = builder.block
        self._body = builder.append_basic_block("loop")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self._index = builder.phi(INT64)
        self._index.add_incoming(INT64(0), before)
        self.values = [builder.phi(value.type) for value in initial]
        for phi, value in zip(self.values, initial, strict=True):
            phi.add_incoming(value, before)
        self.following_index = builder.add(self._index, INT64(1))
        """How many turns there have been when this one ends."""

    def close(self, following: Sequence[ir.Value]) -> list[ir.Value]:
        """End the body: `following` are the carried values of the next turn, and the result after the last."""
        builder = self._builder
        following = list(following)
        self._index.add_incoming(self.following_index, builder.block)
        for phi, value in zip(self.values, following, strict=True):
            phi.add_incoming(value, builder.block)
        after = builder.append_basic_block("after_loop")
        builder.cbranch(builder.icmp_signed("<", self.following_index, self._count), self._body, after)
        builder.position_at_end(after)
        return following
