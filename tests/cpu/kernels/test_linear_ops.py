"""The fused linear, norm and activation kernels against `TorchOps` in fp32.

Runs on an NVIDIA GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from engine.kernels import skinny_linear as skinny
from engine.kernels.gated import silu_mul
from engine.kernels.rms_norm import add_rms_norm
from engine.kernels.skinny_linear import SkinnyTuning
from engine.kernels.torch_ops import TorchOps
from engine.kernels.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6
# Relative to the norm of the result: a few roundings of the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Inputs:
    """Random arguments of one product, with copies that show whether a kernel wrote to them."""

    def __init__(self, rows: int, n: int, k: int, dtype: torch.dtype, *, residual: bool = True, bias: bool = True):
        if DEVICE.type == "cpu" and rows > 4 and dtype == torch.bfloat16:
            dtype = torch.float16  # the interpreter's matrix product takes the bits of bfloat16 for integers
        generator = torch.Generator().manual_seed(rows * 7919 + n * 31 + k)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)

        self.hidden = random(rows, k)
        self.residual = random(rows, k, scale=3.0) if residual else None
        self.gate_up = random(rows, 2 * k)
        self.norm_weight = random(k) * 0.1 + 1
        self.weight = random(n, k, scale=k**-0.5)
        self.bias = random(n) if bias else None
        self._copies = [None if t is None else t.clone() for t in self._tensors()]

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.hidden, self.residual, self.gate_up, self.norm_weight, self.weight, self.bias

    def assert_unchanged(self) -> None:
        for tensor, copy in zip(self._tensors(), self._copies, strict=True):
            assert tensor is None or torch.equal(tensor, copy)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert actual.shape == expected.shape
    assert error < TOLERANCE[actual.dtype], f"relative error {error:.2e}"


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Fresh memory reads as NaN, so an element that a kernel leaves out is seen."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(float("nan")))


def assert_total(total: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal on a GPU; the interpreter truncates to bfloat16 where torch rounds to the nearest."""
    if DEVICE.type == "cuda" or total.dtype == torch.float32:
        assert torch.equal(total, expected)
    else:
        torch.testing.assert_close(total, expected, rtol=2**-7, atol=0)


def expected_product(x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return linear(x.float(), inputs.weight.float(), None if inputs.bias is None else inputs.bias.float())


def expected_norm(total: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return rms_norm(total.float(), inputs.norm_weight.shape, inputs.norm_weight.float(), EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "k"), [(1, 64), (5, 896), (17, 200), (3, 1536)])
@pytest.mark.parametrize("residual", [True, False])
def test_add_rms_norm(rows, k, dtype, residual):
    inputs = Inputs(rows, 8, k, dtype, residual=residual)
    normed, total = add_rms_norm(inputs.hidden, inputs.residual, inputs.norm_weight, EPS)
    if residual:
        assert_total(total, inputs.hidden + inputs.residual)
    else:
        assert total is inputs.hidden
    assert_close(normed, expected_norm(total, inputs))
    inputs.assert_unchanged()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "k"), [(1, 64), (5, 896), (17, 1032)])
def test_silu_mul(rows, k, dtype):
    inputs = Inputs(rows, 8, k, dtype)
    gate, up = inputs.gate_up.float().chunk(2, dim=-1)
    assert_close(silu_mul(inputs.gate_up), silu(gate) * up)
    inputs.assert_unchanged()


# (rows, N, K, tuning): whole and ragged tiles, one and several steps of K, one and several tiles a program.
SHAPES = [
    (1, 24, 64, None),
    (1, 37, 576, SkinnyTuning(8, 1, programs_per_sm=1)),
    (1, 40, 1024, SkinnyTuning(4, 2, programs_per_sm=8)),
    (1, 61, 896, SkinnyTuning(2, 1, programs_per_sm=2)),
    (1, 7, 2056, None),
    (2, 24, 64, None),
    (2, 37, 576, SkinnyTuning(4, 1, programs_per_sm=2)),
    (3, 61, 896, SkinnyTuning(2, 2, programs_per_sm=2)),
    (4, 40, 1032, None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n", "k", "tuning"), SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_skinny_linear(rows, n, k, tuning, dtype, bias):
    inputs = Inputs(rows, n, k, dtype, bias=bias)
    output = skinny.skinny_linear(inputs.hidden, inputs.weight, inputs.bias, tuning)
    assert_close(output, expected_product(inputs.hidden, inputs))
    inputs.assert_unchanged()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n", "k", "tuning"), SHAPES)
@pytest.mark.parametrize("residual", [True, False])
def test_norm_skinny_linear(rows, n, k, tuning, dtype, residual):
    inputs = Inputs(rows, n, k, dtype, residual=residual, bias=not residual)
    output, total = skinny.norm_skinny_linear(
        inputs.hidden, inputs.residual, inputs.norm_weight, EPS, inputs.weight, inputs.bias, tuning
    )
    if residual:
        assert_total(total, inputs.hidden + inputs.residual)
    else:
        assert total is inputs.hidden
    assert_close(output, expected_product(expected_norm(total, inputs), inputs))
    inputs.assert_unchanged()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n", "k", "tuning"), SHAPES)
def test_gated_skinny_linear(rows, n, k, tuning, dtype):
    inputs = Inputs(rows, n, k, dtype)
    gate, up = inputs.gate_up.float().chunk(2, dim=-1)
    output = skinny.gated_skinny_linear(inputs.gate_up, inputs.weight, inputs.bias, tuning)
    assert_close(output, expected_product(silu(gate) * up, inputs))
    inputs.assert_unchanged()


@pytest.mark.parametrize("rows", range(1, 5))
def test_a_row_does_not_depend_on_its_company(rows):
    """The first of `rows` rows equals that row alone, within rounding, and a second call gives the same bits."""
    inputs = Inputs(rows, 40, 256, torch.bfloat16)
    together = skinny.skinny_linear(inputs.hidden, inputs.weight, inputs.bias)
    alone = skinny.skinny_linear(inputs.hidden[:1], inputs.weight, inputs.bias)
    assert_close(together[:1], alone)
    assert torch.equal(together, skinny.skinny_linear(inputs.hidden, inputs.weight, inputs.bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 5, 128, 129])
@pytest.mark.parametrize(("n", "k"), [(40, 256), (24, 100)])
def test_triton_ops_equal_torch_ops(rows, n, k, dtype):
    """Around each switch between the ways, and for a K that only cuBLAS takes."""
    inputs = Inputs(rows, n, k, dtype)
    triton_ops, torch_ops = TritonOps(), TorchOps()
    arguments = (inputs.hidden, inputs.residual, inputs.norm_weight, EPS, inputs.weight, inputs.bias)
    output, total = triton_ops.norm_linear(*arguments)
    expected_output, expected_total = torch_ops.norm_linear(*arguments)
    assert_total(total, expected_total)
    assert_close(output, expected_output)
    for name, x in (("linear", inputs.hidden), ("gated_linear", inputs.gate_up)):
        actual = getattr(triton_ops, name)(x, inputs.weight, inputs.bias)
        assert_close(actual, getattr(torch_ops, name)(x, inputs.weight, inputs.bias))
    inputs.assert_unchanged()


SIZES = (576, 1024, 4096, 6144, 14336, 28672, 49152, 151936)


def test_skinny_tuning_is_within_what_the_kernel_takes():
    for rows, n, k in itertools.product(range(1, 5), SIZES, SIZES):
        tuning = skinny.choose_tuning(rows, n, k, 132)
        assert tuning.num_warps in (4, 8, 16)
        assert tuning.block_n in (1, 2, 4, 8)
        assert 64 <= tuning.num_registers <= 255
