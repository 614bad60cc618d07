from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.database import open_database
from store.usage_db import Lengths, ModelUsage, UsageDb, bucket_of, length_advice, quantile, upper_edge

USAGE = ModelUsage(
    model="m",
    num_requests=100,
    prompt_p50=900,
    prompt_p99=5120,
    prompt_max=7000,
    output_p50=100,
    output_p99=800,
    output_max=1024,
    max_model_len=32768,
    last_used_at=0.0,
)


@pytest.fixture
def usage(tmp_path: Path) -> Iterator[UsageDb]:
    connection = open_database(tmp_path / "quire.db")
    yield UsageDb(connection)
    connection.close()


def counted(*lengths: tuple[int, int], max_model_len: int = 2048) -> Lengths:
    result = Lengths(max_model_len)
    for i, (prompt, output) in enumerate(lengths):
        result.add(prompt, output, 100.0 + i)
    return result


@given(st.integers(0, 2**24))
def test_a_bucket_holds_its_length_and_is_narrow(length: int) -> None:
    edge = upper_edge(bucket_of(length))
    assert length <= edge
    assert edge <= max(1, length * 2 ** (1 / 16))
    assert length > 26 or edge == max(1, length)


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=300), st.floats(0.01, 1.0))
def test_a_quantile_is_never_below_the_true_one_nor_far_above(lengths: list[int], share: float) -> None:
    buckets = counted(*((length, 1) for length in lengths)).prompt
    true = sorted(lengths)[max(1, math.ceil(share * len(lengths))) - 1]
    assert true <= quantile(buckets, max(lengths), share) <= min(true * 2 ** (1 / 16), max(lengths))


def test_batches_add_up(usage: UsageDb) -> None:
    assert usage.models() == []
    assert usage.percentile("m", "prompt", 0.99) == 0
    usage.add({"m": counted(*[(10, 5)] * 98), "other": counted((1, 0))})
    usage.add({"m": counted((2000, 20), (10, 5), max_model_len=4096)})
    m, other = usage.models()
    assert (m.model, m.num_requests, m.last_used_at, m.max_model_len) == ("m", 100, 197.0, 4096)
    assert (m.prompt_p50, m.prompt_p99, m.prompt_max) == (10, 10, 2000)
    assert (m.output_p50, m.output_p99, m.output_max) == (5, 5, 20)
    assert usage.percentile("m", "prompt", 1.0) == 2000
    assert (other.model, other.output_max, other.output_p50) == ("other", 0, 0)


def test_the_most_sequences_at_once_are_kept(usage: UsageDb) -> None:
    first, second = counted((10, 5)), counted((10, 5))
    first.add(10, 5, 1.0, num_at_once=8)
    second.add(10, 5, 1.0, num_at_once=3)
    usage.add({"m": first})
    usage.add({"m": second})
    assert usage.models()[0].max_at_once == 8


def test_the_advice_is_p99_of_the_prompts_plus_the_longest_answer() -> None:
    assert "Your requests need 6,144 tokens" in length_advice(USAGE)
    assert "Your requests so far (99) need" in length_advice(msgspec.structs.replace(USAGE, num_requests=99))
    assert "max_model_len is 32,768; QUIRE_MAX_MODEL_LEN=6144 would serve them" in length_advice(USAGE)
    assert "max_model_len, 6,144, fits them" in length_advice(msgspec.structs.replace(USAGE, max_model_len=6144))
    assert "raise QUIRE_MAX_MODEL_LEN" in length_advice(msgspec.structs.replace(USAGE, max_model_len=6000))


def test_models_that_only_read_need_no_advice() -> None:
    embedder = msgspec.structs.replace(USAGE, output_max=0, prompt_max=90, max_model_len=256)
    assert length_advice(embedder) == "Your texts have up to 90 tokens; the model takes 256."
