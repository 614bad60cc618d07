"""The ranking of `quire recommend`: larger memory never gives less, and what is recommended fits."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.residency.advice.acceptance import why_unsupported
from app.residency.advice.recommend import (
    CONTEXT_TOKENS,
    FEW_SEQUENCES,
    Purpose,
    fits,
    need_of,
    recommend,
    suited,
    why_not_run,
)
from app.residency.arithmetic.footprint import Host
from app.residency.arithmetic.memory import DeviceMemory
from engine.api.architectures import MODEL_TYPES
from store.catalog import catalog_models, distinct_models
from store.catalog_facts import catalog_facts

GIB = 2**30
MODELS = distinct_models()

hosts = st.builds(
    lambda device, gib, utilization, length: Host(
        DeviceMemory(device, int(gib * GIB), 0), utilization, max_model_len=length
    ),
    st.sampled_from(["cpu", "cuda:0"]),
    st.floats(0.1, 300),
    st.floats(0.3, 1.0),
    st.none() | st.integers(64, 40_000),
)
purposes: st.SearchStrategy[Purpose] = st.sampled_from(["chat", "code", "reasoning", "embed", "rerank"])


def best(device: str, gib: float, purpose: Purpose = "chat", sequences: int | None = None) -> str:
    found = recommend(MODELS, Host(DeviceMemory(device, int(gib * GIB), 0), 0.9), purpose, sequences)
    return found[0].model.name


@given(hosts, purposes, st.none() | st.integers(1, 1024))
def test_what_is_recommended_runs_and_fits(host: Host, purpose: Purpose, sequences: int | None) -> None:
    for need in recommend(MODELS, host, purpose, sequences):
        assert need.total_bytes <= host.usable_bytes <= host.memory.total_bytes
        assert need.model.kind == purpose
        assert why_unsupported(catalog_facts(need.model)) is None
        assert need.model.model_type in MODEL_TYPES
        assert need.context == min(CONTEXT_TOKENS, need.model.context_length, host.max_model_len or CONTEXT_TOKENS)


@given(hosts, st.floats(0, 100), purposes)
def test_more_memory_never_takes_a_model_away(host: Host, more_gib: float, purpose: Purpose) -> None:
    larger = DeviceMemory(host.memory.device, host.memory.total_bytes + int(more_gib * GIB), 0)
    smaller_list = recommend(MODELS, host, purpose)
    larger_list = recommend(MODELS, Host(larger, host.utilization, max_model_len=host.max_model_len), purpose)
    larger_names = [need.model.name for need in larger_list]
    assert [need.model.name for need in smaller_list] == [
        name for name in larger_names if name in {need.model.name for need in smaller_list}
    ]
    if smaller_list:
        assert round(larger_list[0].model.parameters, -9) >= round(smaller_list[0].model.parameters, -9)


@given(hosts, purposes)
def test_nothing_that_fits_is_left_out(host: Host, purpose: Purpose) -> None:
    recommended = {need.model.name for need in recommend(MODELS, host, purpose)}
    for model in suited(MODELS, host, purpose):
        if model.name not in recommended:
            assert why_not_run(model) or not fits(need_of(model, host), host)


@given(hosts, purposes)
def test_larger_ones_come_first(host: Host, purpose: Purpose) -> None:
    sizes = [need.model.parameters / 1e9 for need in recommend(MODELS, host, purpose)]
    assert all(later <= earlier + 1.0 for earlier, later in pairwise(sizes))


@pytest.mark.parametrize(
    ("gib", "expected"),
    [
        (8, "qwen3:1.7b"),
        (12, "qwen2.5:3b"),
        (16, "qwen3:4b-instruct-2507"),
        (24, "qwen3:8b"),
        (48, "qwen3:14b"),
        (80, "qwen3:32b"),
    ],
)
def test_usual_gpus(gib: float, expected: str) -> None:
    assert best("cuda:0", gib) == expected


@pytest.mark.parametrize(
    ("gib", "expected"),
    [
        (2, "qwen2.5:0.5b-q4_k_m"),
        (7.7, "qwen3:4b-instruct-2507-q4_k_m"),
        (15.6, "qwen3:8b-q4_k_m"),
        (23.5, "qwen3:14b-q4_k_m"),
        (62.0, "qwen3:32b-q4_k_m"),
    ],
)
def test_usual_amounts_of_ram_as_the_system_counts_them(gib: float, expected: str) -> None:
    assert best("cpu", gib) == expected


def test_few_requests_at_once_leave_room_for_a_larger_model() -> None:
    assert best("cuda:0", 12) == "qwen2.5:3b"
    assert best("cuda:0", 12, sequences=FEW_SEQUENCES) == "qwen3:4b-instruct-2507"


def test_purposes_have_models_of_their_own() -> None:
    assert best("cuda:0", 24, "code") == "qwen2.5-coder:7b"
    assert best("cuda:0", 24, "reasoning") == "deepseek-r1:8b-0528"
    assert best("cuda:0", 24, "embed") == "qwen3-embedding:8b"
    assert best("cuda:0", 24, "rerank") == "qwen3-reranker:8b"
    assert best("cpu", 1.5, "embed") == "bge-base-en"


def test_the_arithmetic_of_one_model() -> None:
    """8.19 billion weights of 2 bytes, 147,456 bytes for each of 8,192 tokens, and about 2.9 GiB to work in."""
    need = need_of(catalog_models()["qwen3:8b"], Host(DeviceMemory("cuda:0", 24 * GIB, 0), 0.9))
    assert (need.weight_bytes, need.cache_bytes) == (16_381_470_720, 147_456 * 8192)
    assert need.total_bytes == need.weight_bytes + need.cache_bytes + need.working_bytes
    assert abs(need.working_bytes - 2.9 * GIB) < GIB // 10


def test_of_one_size_a_login_decides_before_the_age() -> None:
    llama = catalog_models()["llama3.1:8b"]
    newer = msgspec.structs.replace(llama, name="newer", released="2030-01")
    free = msgspec.structs.replace(llama, name="free", gated=False)
    found = recommend([llama, newer, free], Host(DeviceMemory("cuda:0", 24 * GIB, 0), 0.9), "chat")
    assert [need.model.name for need in found] == ["free", "newer", "llama3.1:8b"]


@pytest.mark.parametrize("name", ["mistral:7b", "gemma3:4b", "phi4", "smollm3", "qwen3:30b", "nomic-embed-text"])
def test_families_that_do_not_run_say_why(name: str) -> None:
    reason = why_not_run(catalog_models()[name])
    assert reason is not None and "not s" in reason
