"""The sampler against plain definitions of each filter and penalty, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.sampling import SamplingParams
from engine.core.batch import RowStart
from engine.sampling import seeds
from engine.sampling.filters import NUM_CANDIDATES, Filters, draw
from engine.sampling.sampler import SamplingRow, sample

VOCAB = 400


def make_row(sampling: SamplingParams, *, row: int = 0, prompt: tuple[int, ...] = (1, 2), stop: tuple[int, ...] = ()):
    return RowStart(row, row + 1, prompt, len(prompt), sampling, stop)


def allowed_by_definition(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Token ids that survive the filters, by a full sort of one row."""
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    if top_k > 0:
        order = order[:top_k]
    probabilities = (logits[order] / temperature).double().softmax(-1).tolist()
    kept, mass = set(), 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if kept and (mass >= top_p or probability < min_p * probabilities[0]):
            break
        kept.add(token)
        mass += probability
    return kept


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 300]),
    top_p=st.sampled_from([0.1, 0.6, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
)
def test_only_tokens_within_the_filters_are_drawn(seed, temperature, top_k, top_p, min_p, spread):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB, generator=generator) * spread
    num_draws = 64
    drawn = draw(
        logits.repeat(num_draws, 1),
        Filters(
            torch.full((num_draws,), temperature),
            torch.full((num_draws,), top_k),
            torch.full((num_draws,), top_p),
            torch.full((num_draws,), min_p),
        ),
        (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws,
    )
    # Float32 mass sums may differ by one token at the border of top-p.
    generous = allowed_by_definition(logits, temperature, top_k, min(1.0, top_p + 1e-4), max(0.0, min_p - 1e-6))
    assert set(drawn.tolist()) <= generous


def test_a_drawn_token_is_as_frequent_as_its_probability():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    num_draws = 2000
    ones = torch.ones(num_draws)
    drawn = draw(
        logits.repeat(num_draws, 1),
        Filters(ones, torch.zeros(num_draws, dtype=torch.int64), ones, torch.zeros(num_draws)),
        torch.tensor([seeds.uniform(7, position) for position in range(num_draws)], dtype=torch.float64),
    )
    frequencies = torch.bincount(drawn, minlength=4) / num_draws
    assert torch.allclose(frequencies, logits.exp(), atol=0.04)


def test_top_p_on_a_flat_distribution_reaches_beyond_the_first_candidates():
    """A nearly flat row keeps more tokens than the candidate list holds, so the full sort must serve it."""
    vocab = 4 * NUM_CANDIDATES
    logits = torch.linspace(0, 0.01, vocab)
    drawn = draw(
        logits[None],
        Filters(torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.tensor([0.95]), torch.zeros(1)),
        torch.tensor([0.99], dtype=torch.float64),
    )
    rank = vocab - 1 - int(drawn)
    assert NUM_CANDIDATES < rank < 0.96 * vocab


def test_the_extremes_of_the_uniform_number_stay_inside_the_distribution():
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    ones, zeros = torch.ones(1), torch.zeros(1)
    no_limit = Filters(ones, zeros.long(), ones, zeros)
    assert int(draw(logits, no_limit, torch.tensor([0.0], dtype=torch.float64))) == 0
    assert int(draw(logits, no_limit, torch.tensor([1.0 - 2**-53], dtype=torch.float64))) == 2


def test_a_row_samples_the_same_token_alone_and_in_a_batch():
    token_ids = torch.zeros((8, 16), dtype=torch.int64)
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.3),
        SamplingParams(temperature=1.5, min_p=0.2),
        SamplingParams(temperature=1.0, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
        SamplingParams(temperature=1.0, logit_bias={3: 50.0}),
    ]
    rows = [SamplingRow(make_row(p, row=i), num_tokens=4, seed=i) for i, p in enumerate(params)]
    together, _ = sample(logits.clone(), rows, token_ids)
    alone = [int(sample(logits[i : i + 1].clone(), [row], token_ids)[0]) for i, row in enumerate(rows)]
    assert together.tolist() == alone
    assert alone[7] == 3


def test_penalties_follow_their_definitions():
    prompt, output = (5, 6), (7, 7, 8)
    token_ids = torch.tensor([[*prompt, *output, 0, 0]])
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 2.0, -2.0, 3.0, -3.0]])
    sampling = SamplingParams(temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    row = SamplingRow(make_row(sampling, prompt=prompt), num_tokens=5, seed=0)
    adjusted = logits.clone()
    sample(adjusted, [row], token_ids)
    expected = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -4.0, 1.5 - 2 * 0.5 - 0.25, -6.0 - 0.5 - 0.25]
    assert adjusted[0].tolist() == pytest.approx(expected)


def test_stop_tokens_are_impossible_until_min_tokens():
    logits = torch.zeros(1, 10)
    logits[0, 4] = 9.0
    logits[0, 6] = 5.0
    sampling = SamplingParams(temperature=0.0, min_tokens=2)
    start = make_row(sampling, stop=(4,))
    token_ids = torch.zeros((1, 16), dtype=torch.int64)
    early, _ = sample(logits.clone(), [SamplingRow(start, num_tokens=3, seed=0)], token_ids)
    late, _ = sample(logits.clone(), [SamplingRow(start, num_tokens=4, seed=0)], token_ids)
    assert (int(early), int(late)) == (6, 4)


def test_logprobs_are_the_models_own_and_only_for_rows_that_ask():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    expected = logits.log_softmax(-1)
    rows = [
        SamplingRow(make_row(SamplingParams(temperature=0.0, logprobs=3, presence_penalty=2.0)), 4, 0),
        SamplingRow(make_row(SamplingParams(temperature=0.0), row=1), 4, 0),
    ]
    token_ids = torch.zeros((2, 16), dtype=torch.int64)
    sampled, logprobs = sample(logits.clone(), rows, token_ids)
    assert logprobs[1] is None
    report = logprobs[0]
    assert report is not None
    assert report.logprob == pytest.approx(float(expected[0, sampled[0]]))
    assert list(report.top_ids) == expected[0].topk(3).indices.tolist()
    assert list(report.top_logprobs) == pytest.approx(expected[0].topk(3).values.tolist())


def test_uniform_numbers_are_spread_and_repeatable():
    numbers = [seeds.uniform(42, position) for position in range(1000)]
    assert numbers == [seeds.uniform(42, position) for position in range(1000)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert sum(numbers) / 1000 == pytest.approx(0.5, abs=0.05)
    assert numbers != [seeds.uniform(43, position) for position in range(1000)]
