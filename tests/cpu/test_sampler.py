"""The sampler against plain definitions of each filter and penalty, row by row.

On a machine with an NVIDIA GPU the same tests drive its kernels.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.sampling import SamplingParams
from engine.sampling import filters, seeds
from engine.sampling.filters import NUM_CANDIDATES
from engine.sampling.sampler import sample
from tests.fakes.sampling import assert_keeps_what_is_allowed, make_row, make_settings

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
VOCAB = 400


def random_logits(num_rows: int, vocab_size: int = VOCAB, *, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def sampled_ids(logits: torch.Tensor, rows, token_ids: torch.Tensor) -> list[int]:
    return sample(logits.clone().to(DEVICE), rows, token_ids.to(DEVICE)).token_ids.tolist()


def draw(logits: torch.Tensor, params: SamplingParams, uniform: list[float]) -> list[int]:
    """Draw from one row of logits [V] at each of the numbers."""
    step = make_settings([params] * len(uniform), len(logits), CPU, uniform)
    return filters.choose(logits.repeat(len(uniform), 1), step).tolist()


FILTERS = {
    "temperature": st.sampled_from([0.01, 0.3, 1.0, 2.0, 50.0]),
    "top_k": st.sampled_from([0, 1, 5, 300, VOCAB, 10**6]),
    "top_p": st.sampled_from([1e-6, 0.1, 0.6, 0.95, 1.0]),
    "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
}


@settings(max_examples=80)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.0, 0.01, 1.0, 5.0]), ties=st.booleans(), **FILTERS)
def test_thresholds_follow_the_definitions_of_the_filters(seed, spread, ties, temperature, top_k, top_p, min_p):
    logits = random_logits(1, seed=seed, spread=spread)
    if ties:
        logits = logits.round()
    params = SamplingParams(temperature=temperature, top_k=min(top_k, VOCAB), top_p=top_p, min_p=min_p)
    threshold = filters.thresholds(logits, make_settings([params], VOCAB, CPU).draws)
    assert_keeps_what_is_allowed(logits[0], float(threshold), params)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.01, 1.0, 5.0]), **FILTERS)
def test_all_kept_tokens_are_drawn_and_no_others(seed, spread, temperature, top_k, top_p, min_p):
    """Drawn at evenly spread numbers, tokens come in vocabulary order, as often as their probability says."""
    logits = random_logits(1, seed=seed, spread=spread)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    num_draws = 64
    drawn = draw(logits[0], params, [(index + 0.5) / num_draws for index in range(num_draws)])
    threshold = filters.thresholds(logits, make_settings([params], VOCAB, CPU).draws)
    kept = logits[0].masked_fill(logits[0] < threshold[0], -math.inf)
    expected = (kept.double() / temperature).softmax(-1) * num_draws
    assert all(earlier <= later for earlier, later in pairwise(drawn))
    counts = torch.bincount(torch.tensor(drawn), minlength=VOCAB)
    assert float((counts - expected).abs().max()) <= 1.001


def test_candidates_and_a_full_sort_draw_the_same_tokens():
    """Narrow filters end among the first candidates; the dense draw from the same threshold must agree."""
    logits = random_logits(1, 3000, spread=3.0)
    params = SamplingParams(temperature=0.9, top_k=50, top_p=0.9)
    uniform = [seeds.uniform(3, position) for position in range(40)]
    threshold = filters.thresholds(logits, make_settings([params], 3000, CPU).draws)
    dense = logits.masked_fill(logits < threshold, -math.inf)[0]
    assert draw(logits[0], params, uniform) == draw(dense, SamplingParams(temperature=0.9), uniform)


def test_frequencies_pass_a_chi_square_test():
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    num_draws = 5000
    drawn = draw(probabilities.log(), SamplingParams(), [seeds.uniform(7, position) for position in range(num_draws)])
    observed = torch.bincount(torch.tensor(drawn), minlength=6)
    expected = probabilities * num_draws
    # 20.5 is the 99.9 % quantile with 5 degrees of freedom.
    assert float(((observed - expected) ** 2 / expected).sum()) < 20.5


def test_top_p_on_a_flat_distribution_reaches_beyond_the_first_candidates():
    """A nearly flat row keeps more tokens than the candidate list holds, so the full sort must serve it."""
    vocab = 4 * NUM_CANDIDATES
    logits = torch.linspace(0.01, 0, vocab)
    (drawn,) = draw(logits, SamplingParams(top_p=0.95), [0.99])
    assert NUM_CANDIDATES < drawn < 0.96 * vocab


def test_tokens_tied_at_the_border_of_top_k_all_stay():
    logits = torch.tensor([0.0, 5.0, 3.0, 3.0, 3.0, 1.0])
    assert set(draw(logits, SamplingParams(temperature=3.0, top_k=2), [i / 20 for i in range(20)])) == {1, 2, 3, 4}


def test_the_extremes_of_the_uniform_number_stay_inside_the_distribution():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert draw(logits, SamplingParams(), [0.0, 1.0 - 2**-53]) == [1, 3]


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_broken_logits_still_yield_a_token_of_the_vocabulary(value):
    token_ids = torch.zeros((3, 16), dtype=torch.int32)
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5, top_k=3)]
    rows = [make_row(p, row=index) for index, p in enumerate(params)]
    drawn = sampled_ids(torch.full((3, VOCAB), value), rows, token_ids)
    assert all(0 <= token_id < VOCAB for token_id in drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_samples_the_same_token_alone_and_in_a_batch(dtype):
    token_ids = torch.zeros((8, 16), dtype=torch.int32)
    logits = random_logits(8, seed=1).to(dtype)
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
    rows = [make_row(p, row=i, seed=i) for i, p in enumerate(params)]
    together = sampled_ids(logits, rows, token_ids)
    alone = [sampled_ids(logits[i : i + 1], [row], token_ids)[0] for i, row in enumerate(rows)]
    assert together == alone
    assert alone[7] == 3


def test_a_seed_repeats_itself_and_moves_with_the_position():
    logits = random_logits(1)
    token_ids = torch.zeros((1, 200), dtype=torch.int32)

    def text(seed: int) -> list[int]:
        params = SamplingParams(temperature=2.0)
        steps = [make_row(params, num_tokens=position, seed=seed) for position in range(2, 30)]
        return [sampled_ids(logits, [row], token_ids)[0] for row in steps]

    assert text(5) == text(5)
    assert len(set(text(5))) > 10
    assert text(5) != text(6)


def test_penalties_follow_their_definitions():
    prompt, output = (5, 6), (7, 7, 8)
    token_ids = torch.tensor([[*prompt, *output, 0, 0]], dtype=torch.int32)
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 2.0, -2.0, 3.0, -3.0]])
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    adjusted = logits.clone().to(DEVICE)
    sample(adjusted, [make_row(params, prompt=prompt, num_tokens=5)], token_ids.to(DEVICE))
    expected = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -4.0, 1.5 - 2 * 0.5 - 0.25, -6.0 - 0.5 - 0.25]
    assert adjusted[0].tolist() == pytest.approx(expected)


def test_a_penalty_smaller_than_a_step_of_half_precision_still_counts():
    """Around 15, bfloat16 values lie 0.0625 apart."""
    logits = torch.tensor([[15.0, 15.0]], dtype=torch.bfloat16)
    row = make_row(SamplingParams(temperature=0.0, frequency_penalty=0.01), prompt=(1,), num_tokens=2)
    assert sampled_ids(logits, [row], torch.tensor([[1, 0]], dtype=torch.int32)) == [1]


def test_stop_tokens_are_impossible_until_min_tokens():
    logits = torch.zeros(1, 10)
    logits[0, 4] = 9.0
    logits[0, 6] = 5.0
    params = SamplingParams(temperature=0.0, min_tokens=2, logit_bias={4: 5.0})
    token_ids = torch.zeros((1, 16), dtype=torch.int32)
    early = sampled_ids(logits, [make_row(params, stop=(4,), num_tokens=3)], token_ids)
    late = sampled_ids(logits, [make_row(params, stop=(4,), num_tokens=4)], token_ids)
    assert (early, late) == ([6], [4])


def test_logprobs_are_the_models_own_and_only_for_rows_that_ask():
    logits = random_logits(3, seed=3)
    expected = logits.log_softmax(-1)
    rows = [
        make_row(SamplingParams(temperature=0.0, logprobs=3, presence_penalty=2.0)),
        make_row(SamplingParams(temperature=0.0), row=1),
        make_row(SamplingParams(temperature=1.0, logprobs=0), row=2),
    ]
    samples = sample(logits.clone().to(DEVICE), rows, torch.zeros((3, 16), dtype=torch.int32, device=DEVICE))
    assert samples.logprobs is not None
    reports = samples.logprobs.to_host().by_row(3)
    assert reports[0] is not None and reports[1] is None and reports[2] is not None
    sampled = samples.token_ids.tolist()
    assert reports[0].logprob == pytest.approx(float(expected[0, sampled[0]]), abs=1e-5)
    assert list(reports[0].top_ids) == expected[0].topk(3).indices.tolist()
    assert list(reports[0].top_logprobs) == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-5)
    assert reports[2].logprob == pytest.approx(float(expected[2, sampled[2]]), abs=1e-5)
    assert reports[2].top_ids == ()


def test_nothing_is_reported_when_no_row_asks():
    rows = [make_row(SamplingParams(temperature=0.5))]
    token_ids = torch.zeros((1, 16), dtype=torch.int32, device=DEVICE)
    assert sample(torch.zeros((1, VOCAB), device=DEVICE), rows, token_ids).logprobs is None


def test_uniform_numbers_are_spread_and_repeatable():
    numbers = [seeds.uniform(42, position) for position in range(1000)]
    assert numbers == [seeds.uniform(42, position) for position in range(1000)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert sum(numbers) / 1000 == pytest.approx(0.5, abs=0.05)
    assert numbers != [seeds.uniform(43, position) for position in range(1000)]
