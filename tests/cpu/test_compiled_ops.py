"""The compiled CPU kernels against plain torch, for every kind of dot product this machine can run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from torch.nn.functional import rms_norm, silu

from engine.cpu import activations, dot_products
from engine.cpu.code_cache import FOLDER_VARIABLE
from engine.cpu.isa import Isa, choose_isa
from engine.cpu.lanes import INT64, Emitter
from engine.cpu.ops import CompiledOps
from engine.cpu.program import Capacity, Program, Recorder, Rows
from engine.cpu.step import NUM_TOKENS, STEP_SIZE
from engine.cpu.team import Team
from engine.kernels.torch_ops import TorchOps
from engine.layers.packed_weight import CodedRows, PackedWeight, pack

MAX_TOKENS = 48
NO_ROWS = Rows(0, 0, 0, 0)
ORACLE = TorchOps()


def coded(generator: torch.Generator, rows: int, columns: int, bits: int, is_symmetric: bool) -> CodedRows:
    groups = columns // 32
    codes = torch.randint(0, 256, (rows, groups, 4 * bits), generator=generator, dtype=torch.uint8)
    scales = (torch.rand((rows, groups), generator=generator) / 2**bits).half()
    minimums = None if is_symmetric else -scales * 2 ** (bits - 1) * 0.9
    return CodedRows(bits, columns, codes, scales, minimums)  # type: ignore[arg-type]


def weight(
    generator: torch.Generator, columns: int, *parts: tuple[int, int], is_symmetric: bool = False
) -> PackedWeight:
    return pack([coded(generator, rows, columns, bits, is_symmetric) for rows, bits in parts])


class Recording:
    """One operation recorded on inputs that can be set, and its outputs."""

    def __init__(self, columns: tuple[int, ...], operation: Callable[..., tuple[torch.Tensor, ...]], size: int) -> None:
        recorder = Recorder(Capacity(MAX_TOKENS, 4, 4), NO_ROWS, size)
        ops = CompiledOps()
        handles = [recorder.buffer(width) for width in columns]
        with ops.recording(recorder):
            outputs = operation(ops, *handles)
        self._program: Program = recorder.finish()
        self._inputs = [recorder.view(handle) for handle in handles]
        self._outputs = [recorder.view(output) for output in outputs]
        self._team = Team(size)

    def run(self, *values: torch.Tensor) -> list[torch.Tensor]:
        step = np.zeros(STEP_SIZE, dtype=np.int64)
        step[NUM_TOKENS] = count = len(values[0])
        for memory, value in zip(self._inputs, values, strict=True):
            memory.fill_(float("nan"))
            memory[:count] = value
        self._program.run(self._team, step)
        return [output[:count].clone() for output in self._outputs]


def int32s_at(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))


def quantized(values: torch.Tensor) -> torch.Tensor:
    """What is left of activations [T, K] after eight bits per token and group of 32."""
    groups = values.unflatten(1, (-1, 32))
    peak = groups.abs().amax(-1, keepdim=True)
    codes = (groups * (127 / peak)).round().nan_to_num(0.0)
    return (codes * (peak / 127)).flatten(1)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of a row, relative to the row's root mean square."""
    scale = expected.square().mean(-1, keepdim=True).sqrt()
    return float(((found - expected).abs() / scale).max())


WEIGHT_KINDS = [((48, 4),), ((32, 8),), ((32, 4), (16, 8)), ((32, 4), (16, 4), (35, 8)), ((512, 4),)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("parts", WEIGHT_KINDS)
def test_products_after_norm_gate_and_nothing_equal_torch(parts, is_symmetric, size):
    generator = torch.Generator().manual_seed(1)
    columns = 96
    matrix = weight(generator, columns, *parts, is_symmetric=is_symmetric)
    norm = torch.rand(columns, generator=generator) + 0.5
    bias = torch.randn(matrix.out_features, generator=generator)

    def operation(ops, hidden, residual, gate_up):  # type: ignore[no-untyped-def]
        normed, total = ops.norm_linear(hidden, residual, norm, 1e-5, matrix, bias)
        first, _ = ops.norm_linear(hidden, None, norm, 1e-5, matrix, None)
        return normed, total, first, ops.linear(hidden, matrix, bias), ops.gated_linear(gate_up, matrix, None)

    recording = Recording((columns, columns, 2 * columns), operation, size)
    for count in (1, 2, 3, 7, 16, 17, 48):
        hidden, residual = (torch.randn((count, columns), generator=generator) for _ in range(2))
        gate_up = torch.randn((count, 2 * columns), generator=generator) * 3
        found = recording.run(hidden, residual, gate_up)
        total = hidden + residual
        gate, up = gate_up.chunk(2, dim=-1)
        expected = [
            (rms_norm(total, (columns,), norm, 1e-5), bias),
            (rms_norm(hidden, (columns,), norm, 1e-5), None),
            (hidden, bias),
            (silu(gate) * up, None),
        ]
        assert torch.equal(found.pop(1), total)
        for result, (values, added) in zip(found, expected, strict=True):
            # A norm or a gate that differs in its last bit may give the next code.
            tolerance = 1e-5 if values is hidden else 1e-2
            assert error(result, ORACLE.linear(quantized(values), matrix, added)) < tolerance


@settings(max_examples=40)
@given(st.booleans(), st.integers(2, MAX_TOKENS), st.integers(0, 1000), st.floats(0, 4))
def test_a_row_is_the_same_alone_and_among_outliers(is_symmetric, count, seed, magnitude):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((count, 64), generator=generator)
    hidden[1:] *= 10 ** (magnitude * torch.rand((count - 1, 1), generator=generator))
    (together,) = PLAIN[is_symmetric].run(hidden)
    (alone,) = PLAIN[is_symmetric].run(hidden[:1])
    assert torch.equal(together[:1], alone)


def _plain(is_symmetric: bool) -> Recording:
    matrix = weight(torch.Generator().manual_seed(2), 64, (48, 4), (32, 8), is_symmetric=is_symmetric)
    return Recording((64,), lambda ops, hidden: (ops.linear(hidden, matrix, None),), 1)


PLAIN = {is_symmetric: _plain(is_symmetric) for is_symmetric in (False, True)}


def test_a_row_of_zeros_gives_the_bias():
    generator = torch.Generator().manual_seed(3)
    matrix = weight(generator, 32, (16, 4))
    bias = torch.randn(16, generator=generator)
    recording = Recording((32,), lambda ops, hidden: (ops.linear(hidden, matrix, bias),), 1)
    (found,) = recording.run(torch.zeros((2, 32)))
    assert torch.equal(found, bias.expand(2, 16))


def test_rotation_tables_and_sums_equal_torch():
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, 64, 2) / 64)

    def operation(ops, left, right):  # type: ignore[no-untyped-def]
        recorder = ops._recorder
        tables = ops.rotation_tables(recorder.position_handle, frequencies, 1.5)
        int32s_at(recorder.positions, MAX_TOKENS)[:] = np.arange(MAX_TOKENS) * 997
        return (*tables, ops.add(left, right))

    recording = Recording((40, 40), operation, 1)
    left, right = torch.randn(20, 40), torch.randn(20, 40)
    cos, sin, total = recording.run(left, right)
    expected = ORACLE.rotation_tables(torch.arange(20) * 997, frequencies, 1.5)
    torch.testing.assert_close(cos, expected[0], atol=2e-6, rtol=0)
    torch.testing.assert_close(sin, expected[1], atol=2e-6, rtol=0)
    assert torch.equal(total, left + right)


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_embedding_looks_rows_up_exactly(bits, is_symmetric):
    table = weight(torch.Generator().manual_seed(4), 64, (37, bits), is_symmetric=is_symmetric)
    recorder = Recorder(Capacity(MAX_TOKENS, 4, 4), NO_ROWS, 2)
    ops = CompiledOps()
    with ops.recording(recorder):
        output = ops.embed(recorder.token_id_handle, table)
    int32s_at(recorder.token_ids, 37)[:] = np.arange(37)[::-1]
    step = np.zeros(STEP_SIZE, dtype=np.int64)
    step[NUM_TOKENS] = 37
    recorder.finish().run(Team(2), step)
    torch.testing.assert_close(recorder.view(output)[:37], table.dequantize().flip(0), atol=0, rtol=1e-6)


def test_an_operation_that_is_not_recorded_is_refused():
    recorder = Recorder(Capacity(4, 4, 4), NO_ROWS, 1)
    ops = CompiledOps()
    handle = recorder.buffer(64)
    with ops.recording(recorder), pytest.raises(TypeError, match="not recorded"):
        ops.add(handle * 2, handle)


def test_buffers_in_use_at_different_times_share_memory():
    recorder = Recorder(Capacity(16, 4, 4), NO_ROWS, 1)
    ops = CompiledOps()
    first = recorder.buffer(64)
    with ops.recording(recorder):
        total = first
        for _ in range(7):
            total = ops.add(total, total)
    program = recorder.finish()
    recorder.view(first).fill_(1)
    step = np.zeros(STEP_SIZE, dtype=np.int64)
    step[NUM_TOKENS] = 16
    program.run(Team(1), step)
    assert torch.equal(recorder.view(first), torch.ones(16, 64)), "its handle lives, so its memory is its own"
    assert torch.equal(recorder.view(total), torch.full((16, 64), 2.0**7))
    places = sorted(recorder.view(handle).data_ptr() for handle in (first, total))
    assert places[1] - places[0] <= 2 * 16 * recorder.stride(first), "all between share two places"


@pytest.mark.parametrize(
    ("machine", "features", "isa"),
    [
        ("x86_64", {"avx512vnni", "avx512f", "avx512bw", "avx2", "fma", "f16c"}, Isa("vnni512", 16)),
        (
            "x86_64",
            {"avx512vnni", "avx512f", "avx512bw", "avx2", "fma", "f16c", "amx-tile", "amx-int8"},
            Isa("vnni512", 16, has_amx=True),
        ),
        (
            "x86_64",
            {"avx512vnni", "avx512f", "avx512bw", "avx2", "fma", "f16c", "amx-tile", "amx-bf16"},
            Isa("vnni512", 16, has_amx_floats=True),
        ),
        ("AMD64", {"avxvnni", "avx2", "fma", "f16c"}, Isa("vnni256", 4)),
        ("x86_64", {"avx2", "fma", "f16c"}, Isa("maddubs", 4)),
        ("x86_64", {"sse4.2"}, None),
        ("aarch64", {"neon", "i8mm"}, Isa("usdot", 4)),
        ("arm64", {"neon"}, Isa("widening", 4)),
        ("riscv64", set(), None),
    ],
)
def test_every_processor_has_its_dot_product(machine, features, isa):
    assert choose_isa(machine, frozenset(features)) == isa


@pytest.mark.parametrize(
    "isa", [Isa("vnni256", 4), Isa("maddubs", 4), Isa("widening", 4)], ids=lambda isa: isa.dot_product
)
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_other_processors_dot_products_give_the_same_sums(isa, bits, is_symmetric, monkeypatch, tmp_path):
    """What this processor is not chosen for, but can run."""
    if isa.dot_product == "vnni256" and not {"avx_vnni", "avx512_vnni"} & set(
        Path("/proc/cpuinfo").read_text().split()
    ):
        pytest.skip("this processor has no VNNI")
    generator = torch.Generator().manual_seed(5)
    matrix = weight(generator, 96, (48, bits), is_symmetric=is_symmetric)
    hidden = torch.randn((7, 96), generator=generator) * 100

    def run() -> torch.Tensor:
        return Recording((96,), lambda ops, hidden: (ops.linear(hidden, matrix, None),), 1).run(hidden)[0]

    expected = run()
    for module in (dot_products, activations):
        monkeypatch.setattr(module, "host_isa", lambda: isa)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert error(run(), expected) < 1e-6


def test_arm_gets_its_dot_product_instruction():
    """Compiled for another processor, and read."""
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT64] * 4), "dots")
    emit = Emitter(ir.IRBuilder(function.append_basic_block()))
    operands = (emit.load_ints(argument) for argument in function.args[:3])
    emit.store(dot_products._dot_usdot(emit, *operands).value, function.args[3])
    emit.builder.ret_void()
    target = llvmlite.binding.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(features="+i8mm", opt=2)
    assembly = machine.emit_assembly(llvmlite.binding.parse_assembly(str(module)))
    assert assembly.count("usdot\t") == 4
