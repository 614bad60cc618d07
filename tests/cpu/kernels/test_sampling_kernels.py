"""The sampling kernels against their torch counterparts and against the definitions of the filters.

Without an NVIDIA GPU they run in Triton's interpreter.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.sampling import SamplingParams
from engine.kernels import adjust, sample
from engine.kernels.greedy import greedy_append, likeliest
from engine.kernels.scores import measure
from engine.kernels.threshold import find_thresholds
from engine.sampling import adjust as torch_adjust
from engine.sampling import filters, seeds
from engine.sampling.sampler import sample as sample_step
from engine.sampling.settings import build_settings
from tests.fakes.sampling import assert_keeps_what_is_allowed, make_row, make_settings

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> torch.Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def thresholds(logits: torch.Tensor, params: list[SamplingParams]) -> list[float]:
    on_device = logits.to(DEVICE)
    step = make_settings(params, logits.shape[1], DEVICE)
    return find_thresholds(on_device, step, measure(on_device)).tolist()


def choose(logits: torch.Tensor, params: list[SamplingParams], uniform: list[float] | None = None) -> list[int]:
    return sample.choose(logits.to(DEVICE), make_settings(params, logits.shape[1], DEVICE, uniform)).tolist()


@pytest.mark.parametrize("vocab_size", [1, 33, 2048, 4099])
@pytest.mark.parametrize("dtype", DTYPES)
def test_likeliest_is_the_first_largest(vocab_size: int, dtype: torch.dtype) -> None:
    logits = random_logits(3, vocab_size, dtype)
    logits[1] = logits[1].round()
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert likeliest(logits.to(DEVICE)).tolist() == expected


def test_likeliest_among_broken_logits() -> None:
    logits = torch.full((5, 3000), -math.inf)
    logits[1] = math.nan
    logits[2] = torch.where(torch.arange(3000) == 2500, 1.0, math.nan)
    logits[3, 2999] = -5.0
    logits[4, :] = -0.0
    logits[4, 7:] = 0.0
    assert likeliest(logits.to(DEVICE)).tolist() == [0, 0, 2500, 2999, 0]


@pytest.mark.parametrize("out_dtype", [torch.int32, torch.int64])
def test_greedy_append_writes_the_next_position_of_rows_that_have_one(out_dtype: torch.dtype) -> None:
    logits = random_logits(4, 5003, torch.bfloat16)
    rows = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    positions = torch.tensor([3, 3, 9, 0], dtype=torch.int32)
    table = torch.full((3, 10), -7, dtype=torch.int32, device=DEVICE)
    out = torch.full((4,), -7, dtype=out_dtype, device=DEVICE)
    greedy_append(logits.to(DEVICE), rows.to(DEVICE), positions.to(DEVICE), table, out)
    best = logits.float().argmax(-1)
    expected = torch.full((3, 10), -7, dtype=torch.int32)
    expected[2, 4], expected[1, 1] = best[0], best[3]
    assert out.tolist() == best.tolist()
    assert table.tolist() == expected.tolist()


@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_adjust_equals_torch(table_dtype: torch.dtype) -> None:
    vocab_size = 700
    params = [
        SamplingParams(frequency_penalty=0.3, presence_penalty=-0.5, logit_bias={3: 2.0, 699: -100.0}),
        SamplingParams(min_tokens=5000, logit_bias={9: 4.0}),
        SamplingParams(),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(repetition_penalty=0.8, frequency_penalty=-1.0, presence_penalty=0.5),
    ]
    lengths = [1300, 20, 20, 513, 2]
    rows = [
        make_row(p, row=4 - index, prompt=(0,) * (length // 2), stop=(9, 11), num_tokens=length)
        for index, (p, length) in enumerate(zip(params, lengths, strict=True))
    ]
    # Few distinct ids, so that counts above 1 and tokens of both prompt and output are common.
    table = torch.randint(300, (5, 1500), generator=torch.Generator().manual_seed(0)).to(table_dtype)
    expected = random_logits(5, vocab_size)
    found = expected.clone().to(DEVICE)
    torch_adjust.adjust(expected, build_settings(rows, vocab_size, CPU), table)
    adjust.adjust(found, build_settings(rows, vocab_size, DEVICE), table.to(DEVICE))
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=1.5, min_p=0.05),
    SamplingParams(top_k=1),
    SamplingParams(temperature=3.0, top_k=1000, top_p=0.99, min_p=0.001),
    SamplingParams(top_k=10**6, top_p=1e-6),
    SamplingParams(temperature=100.0, top_p=0.5),
    SamplingParams(temperature=1e-7),
    SamplingParams(temperature=1e-7, top_p=0.5),
]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(17, DTYPES[0]), (1024, DTYPES[2]), (3001, DTYPES[1])])
def test_choose_equals_torch_in_mixed_batches(vocab_size: int, dtype: torch.dtype) -> None:
    logits = random_logits(len(MIXED), vocab_size, dtype)
    expected = filters.choose(logits.clone(), make_settings(MIXED, vocab_size, CPU)).tolist()
    assert choose(logits, MIXED) == expected


def test_a_row_draws_the_same_token_alone_and_in_a_batch() -> None:
    logits = random_logits(len(MIXED), 2500)
    uniform = [seeds.uniform(index, 1) for index in range(len(MIXED))]
    together = choose(logits, MIXED, uniform)
    for index in (1, 3, 6):
        alone = choose(logits[index : index + 1], [MIXED[index]], [uniform[index]])
        assert alone == [together[index]]


@settings(max_examples=12 if DEVICE == CPU else 200)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from(DTYPES),
    vocab_size=st.sampled_from([5, 300, 1777]),
    shape=st.sampled_from(["normal", "ties", "flat", "outlier", "forbidden", "equal", "negative"]),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 20.0]),
    top_k=st.sampled_from([0, 1, 3, 250]),
    top_p=st.sampled_from([1e-5, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
)
def test_thresholds_follow_the_definitions_of_the_filters(
    seed, dtype, vocab_size, shape, temperature, top_k, top_p, min_p
) -> None:
    logits = random_logits(1, vocab_size, seed=seed)
    match shape:
        case "ties":
            logits = logits.round()
        case "flat":
            logits = logits * 0.003
        case "outlier":
            logits[0, seed % vocab_size] = 90.0
        case "forbidden":
            logits[logits < 1.0] = -math.inf
            logits[0, 0] = 1.0
        case "equal":
            logits = torch.full_like(logits, 2.5)
        case "negative":
            logits = logits - 40.0
    logits = logits.to(dtype)
    if top_k in (0, vocab_size) and top_p == 1.0:
        top_p = 0.5
    params = SamplingParams(temperature=temperature, top_k=min(top_k, vocab_size - 1), top_p=top_p, min_p=min_p)
    (threshold,) = thresholds(logits, [params])
    assert_keeps_what_is_allowed(logits[0], threshold, params)


@pytest.mark.parametrize("params", [SamplingParams(top_k=50), SamplingParams(top_k=7000, top_p=0.4)])
def test_a_threshold_among_too_many_candidates_is_found_in_the_whole_row(params: SamplingParams) -> None:
    """One outlier stretches the ladder so far that nearly all tokens lie between the same two rungs."""
    logits = random_logits(1, 18_000) * 0.001
    logits[0, 123] = 2.0
    (threshold,) = thresholds(logits, [params])
    assert_keeps_what_is_allowed(logits[0], threshold, params)


def test_top_p_is_measured_on_what_top_k_leaves_even_if_its_border_is_a_rung_of_the_ladder() -> None:
    """With the mean at 0 and the largest logit at 11 the rungs are whole numbers."""
    logits = torch.tensor([[-11.0, 10.0, -10.0, 11.0, 1.0, -1.0]])
    assert thresholds(logits, [SamplingParams(temperature=100.0, top_k=2, top_p=0.4)]) == [11.0]
    assert thresholds(logits, [SamplingParams(temperature=100.0, top_k=2, top_p=0.6)]) == [10.0]


def test_tokens_are_as_frequent_as_their_probability() -> None:
    """Evenly spread numbers draw each token as often as its probability says, give or take one."""
    num_draws = 48 if DEVICE == CPU else 4096
    logits = torch.full((1300,), -math.inf)
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    tokens = torch.tensor([5, 1023, 1024, 1299])
    logits[tokens] = probabilities.log() * 2
    uniform = [(index + 0.5) / num_draws for index in range(num_draws)]
    drawn = choose(logits.repeat(num_draws, 1), [SamplingParams(temperature=2.0)] * num_draws, uniform)
    counts = torch.bincount(torch.tensor(drawn), minlength=1300)
    assert int(counts.sum()) == int(counts[tokens].sum())
    assert float((counts[tokens] - probabilities * num_draws).abs().max()) <= 1.0


def test_the_extremes_of_the_uniform_number_stay_inside_the_distribution() -> None:
    logits = torch.full((2, 1500), -math.inf)
    logits[:, [1030, 1400]] = 0.0
    assert choose(logits, [SamplingParams()] * 2, [0.0, 1.0 - 2**-53]) == [1030, 1400]


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_broken_logits_still_yield_a_token_of_the_vocabulary(value: float) -> None:
    drawn = choose(torch.full((len(MIXED), 1100), value), MIXED)
    assert all(0 <= token_id < 1100 for token_id in drawn)


@pytest.mark.skipif(DEVICE == CPU, reason="the CPU never waits for itself")
def test_a_sampled_step_does_not_wait_for_the_device() -> None:
    rows = [make_row(p, row=index % 4) for index, p in enumerate(MIXED)]
    rows += [make_row(SamplingParams(logprobs=5, frequency_penalty=0.5, logit_bias={1: 1.0}))]
    logits = random_logits(len(rows), 5000, torch.bfloat16).to(DEVICE)
    table = torch.zeros((4, 64), dtype=torch.int32, device=DEVICE)
    sample_step(logits.clone(), rows, table)
    fresh = logits.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        samples = sample_step(fresh, rows, table)
        assert samples.logprobs is not None
        samples.logprobs.to_host(non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
