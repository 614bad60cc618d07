"""Sampling rows and settings for tests, and what the filters keep by their plain definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.api.sampling import SamplingParams
from engine.core.batch import RowStart
from engine.sampling.settings import SamplingRow, StepSettings, build_settings


def make_row(
    params: SamplingParams,
    *,
    row: int = 0,
    prompt: tuple[int, ...] = (1, 2),
    stop: tuple[int, ...] = (),
    num_tokens: int = 4,
    seed: int = 0,
) -> SamplingRow:
    return SamplingRow(RowStart(row, row + 1, prompt, len(prompt), params, stop), num_tokens, seed)


def make_settings(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device, uniform: Sequence[float] | None = None
) -> StepSettings:
    """Settings of rows that sample with `params`, drawing at the numbers `uniform` if they are given."""
    rows = [make_row(p, row=index, seed=index) for index, p in enumerate(params)]
    settings = build_settings(rows, vocab_size, device)
    if uniform is not None:
        settings.draws[:, 4] = torch.tensor(uniform, dtype=torch.float64).to(device)
    return settings


def assert_keeps_what_is_allowed(logits: torch.Tensor, threshold: float, params: SamplingParams) -> None:
    """Check a threshold against the definitions of the filters: logits [V], in float64, masses within 1e-6.

    Tokens tied at the border of top-k stay; top-p is measured on what top-k leaves.
    """
    scores = logits.double().cpu().nan_to_num(-1e30, 1e30, -1e30)
    kept = scores >= threshold
    in_top_k = scores >= scores.sort(descending=True).values[params.top_k - 1] if params.top_k > 0 else scores > -2e30
    mass = ((scores - scores.max()) / max(params.temperature, 1e-6)).exp().masked_fill(~in_top_k, 0.0)
    total = mass.sum()
    floor = scores.max() + params.temperature * math.log(params.min_p) if params.min_p > 0 else -2e30
    tolerance = 1e-6 * (1.0 + float(abs(scores.max())))
    assert bool(kept.any())
    assert not bool((kept & ~in_top_k).any())
    assert not bool((kept & (scores < floor - tolerance)).any())
    # Everything that is dropped is dropped by some filter: what lies above it is enough for top-p already.
    dropped = in_top_k & ~kept & (scores > floor + tolerance) & (mass > 0)
    if bool(dropped.any()):
        assert params.top_p < 1.0
        assert float(mass[kept].sum()) >= params.top_p * float(total) * (1 - 1e-6)
    # The least likely kept token is needed to reach top-p.
    above = float(mass[scores > scores[kept].min()].sum())
    assert params.top_p >= 1.0 or above < params.top_p * float(total) * (1 + 1e-6)
