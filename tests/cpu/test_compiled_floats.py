"""Compiled products with float weights against torch in float64, in every format and for other processors' tiles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import rms_norm, silu

from engine.cpu import activations
from engine.cpu.code_cache import FOLDER_VARIABLE
from engine.cpu.isa import Isa
from engine.cpu.ops import CompiledOps
from engine.cpu.program import Capacity, Recorder, Rows
from engine.cpu.step import NUM_TOKENS, STEP_SIZE
from engine.cpu.team import Team
from engine.layers.packed_floats import FLOAT_DTYPES
from engine.layers.packed_weight import PackedWeight, pack

MAX_TOKENS = 48
NO_ROWS = Rows(0, 0, 0, 0)
TEAMS = {size: Team(size) for size in (1, 2)}
ROUNDING = 2.0**-24
"""The relative error of one operation in float32."""

any_dtype = st.sampled_from(FLOAT_DTYPES)


class Recording:
    """One operation recorded on inputs that can be set, and its outputs."""

    def __init__(
        self, columns: tuple[int, ...], operation: Callable[..., tuple[torch.Tensor, ...]], size: int = 1
    ) -> None:
        recorder = Recorder(Capacity(MAX_TOKENS, 4, 4), NO_ROWS, size)
        ops = CompiledOps()
        handles = [recorder.buffer(width) for width in columns]
        with ops.recording(recorder):
            outputs = operation(ops, *handles)
        self._program = recorder.finish()
        self._inputs = [recorder.view(handle) for handle in handles]
        self._outputs = [recorder.view(output) for output in outputs]
        self._team = TEAMS[size]

    def run(self, *values: torch.Tensor) -> list[torch.Tensor]:
        step = np.zeros(STEP_SIZE, dtype=np.int64)
        step[NUM_TOKENS] = count = len(values[0])
        for memory, value in zip(self._inputs, values, strict=True):
            memory.fill_(float("nan"))
            memory[:count] = value
        self._program.run(self._team, step)
        return [output[:count].clone() for output in self._outputs]


def weights(generator: torch.Generator, columns: int, *parts: tuple[int, torch.dtype]) -> list[torch.Tensor]:
    return [torch.randn((rows, columns), generator=generator).to(dtype) for rows, dtype in parts]


def assert_product(found: torch.Tensor, inputs: torch.Tensor, matrix: torch.Tensor, *, num_roundings: int = 0) -> None:
    """`found` is inputs · matrixᵀ, both float64, up to what float32 must lose.

    Each of the K additions of a sum costs one rounding (Higham 2002, section 3.1), each input `num_roundings`.
    """
    bound = ROUNDING * (inputs.shape[1] + num_roundings) * (inputs.abs() @ matrix.abs().T)
    assert bool(((found - inputs @ matrix.T).abs() <= bound).all())


def plain_product(matrix: PackedWeight, bias: torch.Tensor | None = None, size: int = 1) -> Recording:
    return Recording((matrix.in_features,), lambda ops, hidden: (ops.linear(hidden, matrix, bias),), size)


@settings(max_examples=40)
@given(
    parts=st.lists(st.tuples(st.integers(1, 12).map(lambda tiles: 16 * tiles), any_dtype), min_size=1, max_size=3),
    rest=st.integers(0, 15),
    groups=st.integers(1, 20),
    count=st.integers(1, MAX_TOKENS),
    size=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_products_equal_torch(
    parts: list[tuple[int, torch.dtype]], rest: int, groups: int, count: int, size: int, seed: int
) -> None:
    parts = [*parts[:-1], (parts[-1][0] + rest, parts[-1][1])]
    generator = torch.Generator().manual_seed(seed)
    matrices = weights(generator, 16 * groups, *parts)
    packed = pack(matrices)
    bias = torch.randn(packed.out_features, generator=generator)
    hidden = torch.randn((count, 16 * groups), generator=generator)
    (found,) = plain_product(packed, bias, size).run(hidden)
    # The bias is one more input.
    inputs = torch.cat((hidden, torch.ones((count, 1))), dim=1).double()
    matrix = torch.cat([matrix.double() for matrix in matrices])
    assert_product(found, inputs, torch.cat((matrix, bias.double().unsqueeze(1)), dim=1))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("columns", [48, 176])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_norm_and_gate_come_before_the_product(dtype: torch.dtype, columns: int, size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    (values,) = weights(generator, columns, (100, dtype))
    matrix, matrix64 = pack([values]), values.double()
    norm = torch.rand(columns, generator=generator) + 0.5

    def operation(
        ops: CompiledOps, hidden: torch.Tensor, residual: torch.Tensor, gate_up: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        normed, total = ops.norm_linear(hidden, residual, norm, 1e-5, matrix, None)
        first, copy = ops.norm_linear(hidden, None, norm, 1e-5, matrix, None)
        return normed, total, first, copy, ops.gated_linear(gate_up, matrix, None)

    recording = Recording((columns, columns, 2 * columns), operation, size)
    for count in (1, 2, 3, 7, 16, 17, 48):
        hidden, residual = (torch.randn((count, columns), generator=generator) for _ in range(2))
        gate_up = torch.randn((count, 2 * columns), generator=generator) * 3
        normed, total, first, copy, gated = recording.run(hidden, residual, gate_up)
        assert torch.equal(total, hidden + residual)
        assert torch.equal(copy, hidden)
        gate, up = gate_up.double().chunk(2, dim=-1)
        for result, source in ((normed, total), (first, hidden)):
            inputs = rms_norm(source.double(), (columns,), norm.double(), 1e-5)
            assert_product(result, inputs, matrix64, num_roundings=columns // 16 + 10)
        assert_product(gated, silu(gate) * up, matrix64, num_roundings=10)


RAGGED = {dtype: pack(weights(torch.Generator().manual_seed(2), 80, (16 * 7 + 3, dtype))) for dtype in FLOAT_DTYPES}
PRODUCTS = {dtype: plain_product(matrix) for dtype, matrix in RAGGED.items()}


@settings(max_examples=25)
@given(any_dtype, st.integers(2, MAX_TOKENS), st.integers(0, 1000), st.floats(0, 30))
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype, count: int, seed: int, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((count, 80), generator=generator)
    hidden[1:] *= 10 ** (magnitude * torch.rand((count - 1, 1), generator=generator))
    (together,) = PRODUCTS[dtype].run(hidden)
    for row in (0, count - 1):
        (alone,) = PRODUCTS[dtype].run(hidden[row : row + 1])
        assert torch.equal(together[row : row + 1], alone)


def test_rows_that_are_no_numbers_keep_to_themselves() -> None:
    hidden = torch.randn((5, 80), generator=torch.Generator().manual_seed(3))
    (expected,) = PRODUCTS[torch.float32].run(hidden)
    hidden[3] = torch.nan
    (found,) = PRODUCTS[torch.float32].run(hidden)
    assert found[3].isnan().all()
    rest = torch.tensor([0, 1, 2, 4])
    assert torch.equal(found[rest], expected[rest])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_number_of_a_format_is_read_exactly(dtype: torch.dtype) -> None:
    """Subnormal and huge ones too: the products with one are the weights, and embeddings are rows."""
    if dtype == torch.float32:
        values = torch.tensor([1e-42, -3e38, 1 / 3, -0.0] * 80).view(20, 16)
    else:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype).view(-1, 16)
        values = values[values.isfinite().all(dim=1)]
    matrix = pack([values])
    (found,) = plain_product(matrix).run(torch.eye(16))
    assert torch.equal(found, values.float().T)
    recorder = Recorder(Capacity(len(values), 4, 4), NO_ROWS, 2)
    ops = CompiledOps()
    with ops.recording(recorder):
        output = ops.embed(recorder.token_id_handle, matrix)
    token_ids = np.arange(len(values), dtype=np.int32)[::-1].copy()
    ctypes.memmove(recorder.token_ids, token_ids.ctypes.data, token_ids.nbytes)
    step = np.zeros(STEP_SIZE, dtype=np.int64)
    step[NUM_TOKENS] = len(values)
    recorder.finish().run(TEAMS[2], step)
    assert torch.equal(recorder.view(output)[: len(values)], values.float().flip(0))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_smaller_tiles_give_the_same_sums(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As processors with fewer registers use them; the results are the same to the last bit."""
    hidden = torch.randn((11, 80), generator=torch.Generator().manual_seed(4))

    def run() -> list[torch.Tensor]:
        product = plain_product(RAGGED[dtype])
        return [product.run(hidden[:count])[0] for count in (1, 2, 4, 11)]

    expected = run()
    monkeypatch.setattr(activations, "host_isa", lambda: Isa("widening", 4))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    for found, wanted in zip(run(), expected, strict=True):
        assert torch.equal(found, wanted)
