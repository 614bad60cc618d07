"""Quantised matrices are as close as eight bits allow, at every magnitude; odd numbers are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.loading import quantize
from engine.loading.quantize import quantize_rows

SMALLEST_HALF = 2.0**-24


@given(
    out_features=st.integers(1, 20),
    in_features=st.integers(1, 100),
    magnitude=st.floats(-9, 4),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100)
def test_every_number_is_off_by_half_a_step_at_most(
    out_features: int, in_features: int, magnitude: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn((out_features, in_features), generator=generator).clamp(-5, 5)
    values = (spread * 10**magnitude).to(dtype)
    rows = quantize_rows("w", values)
    steps = rows.scales.float().repeat_interleave(32, dim=1)[:, :in_features]
    assert rows.shape == values.shape
    assert ((rows.dequantize() - values.float()).abs() <= 0.5005 * steps + 1e-12).all()
    # A step is no longer than it must be.
    padded = torch.nn.functional.pad(values.float().abs(), (0, -in_features % 32)).unflatten(1, (-1, 32))
    assert (rows.scales.float() <= padded.amax(dim=2) / 127 * (1 + 2**-10) + SMALLEST_HALF).all()


def test_zeros_stay_zeros() -> None:
    rows = quantize_rows("w", torch.zeros(3, 40))
    assert not rows.dequantize().any()
    assert not rows.scales.any()


def test_rows_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn((37, 64), generator=torch.Generator().manual_seed(0))
    whole = quantize_rows("w", values)
    monkeypatch.setattr(quantize, "_CHUNK_ELEMENTS", 300)
    assert torch.equal(quantize_rows("w", values).codes, whole.codes)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_refused(number: float) -> None:
    values = torch.ones(4, 40)
    values[2, 35] = number
    with pytest.raises(BrokenCheckpoint, match="'w' holds numbers that are not finite"):
        quantize_rows("w", values)


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="'w' holds numbers too large"):
        quantize_rows("w", torch.full((1, 32), 1e7))
