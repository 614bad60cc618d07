"""What a model will take before it is there: weights, workspace, and a cache for the traffic that is known."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.residency.arithmetic.demand import ENOUGH_REQUESTS, USUAL_CONCURRENCY, Traffic, demand
from app.residency.arithmetic.footprint import CPU_MAX_CACHE_BYTES, Host, footprint
from app.residency.arithmetic.memory import DeviceMemory
from app.residency.arithmetic.tenants import DeviceShare
from store.catalog import catalog_models
from store.catalog_facts import catalog_facts
from store.facts import ModelFacts

GIB = 2**30
R1_DISTILL = catalog_facts(catalog_models()["deepseek-r1:1.5b"])
MINILM = catalog_facts(catalog_models()["all-minilm:l6"])
GPU = DeviceShare("cuda:0", 24 * GIB, 0, 0.92)
RAM = DeviceShare("cpu", 24 * GIB, 0, 0.92)
BLOCK = 458_752


def traffic(**changes: int) -> Traffic:
    return Traffic(**{"num_requests": 1000, "prompt_p99": 2000, "output_max": 500, "peak_concurrency": 10} | changes)


def test_without_a_record_usual_conversations_and_one_of_full_length() -> None:
    need = demand(R1_DISTILL, GPU)
    assert need.least_kv_bytes == 8192 * 28_672
    assert need.wanted_kv_bytes == 131_072 * 28_672
    assert need.most_kv_bytes == 256 * 131_072 * 28_672
    assert 2 * R1_DISTILL.num_parameters < need.fixed_bytes < 2 * R1_DISTILL.num_parameters + 3 * GIB


def test_a_short_context_bounds_everything() -> None:
    need = demand(R1_DISTILL, GPU, max_model_len=1000, max_num_seqs=8)
    assert need.least_kv_bytes == 63 * BLOCK
    assert need.wanted_kv_bytes == USUAL_CONCURRENCY * 63 * BLOCK
    assert need.most_kv_bytes == 8 * 63 * BLOCK


def test_recorded_traffic_says_how_long_and_how_many() -> None:
    need = demand(R1_DISTILL, GPU, max_model_len=8192, traffic=traffic())
    assert need.least_kv_bytes == 157 * BLOCK, "2,500 tokens in blocks of 16"
    assert need.wanted_kv_bytes == 10 * 157 * BLOCK
    few = demand(R1_DISTILL, GPU, max_model_len=8192, traffic=traffic(num_requests=ENOUGH_REQUESTS - 1))
    assert few == demand(R1_DISTILL, GPU, max_model_len=8192)


def test_a_cache_in_ram_begins_small() -> None:
    need = demand(R1_DISTILL, RAM)
    assert need.least_kv_bytes == 8192 * 57_344, "float32 beside weights that are floats"
    assert need.wanted_kv_bytes == CPU_MAX_CACHE_BYTES


def test_an_encoder_has_no_cache() -> None:
    need = demand(MINILM, RAM)
    assert (need.least_kv_bytes, need.wanted_kv_bytes, need.most_kv_bytes) == (0, 0, 0)
    assert MINILM.weight_bytes < need.fixed_bytes < GIB


def test_encoders_in_ram_are_float32_however_they_are_stored() -> None:
    half = msgspec.structs.replace(MINILM, weight_bytes=2 * MINILM.num_parameters)
    whole = footprint(half, Host(DeviceMemory("cpu", 24 * GIB, 0), 0.92))
    assert whole.weight_bytes == 4 * MINILM.num_parameters
    assert footprint(half, Host(DeviceMemory("cuda:0", 24 * GIB, 0), 0.92)).weight_bytes == 2 * MINILM.num_parameters


facts = st.builds(
    lambda parameters, layers, width, context: ModelFacts(
        architecture="llama", num_parameters=parameters, quantization="BF16", weight_bytes=2 * parameters,
        num_layers=layers, kv_bytes_per_token=4 * layers * width, context_length=context, dtype="bfloat16",
    ),
    st.integers(10**6, 10**11), st.integers(1, 100), st.integers(64, 8192), st.integers(16, 2**20),
)  # fmt: skip
records = st.none() | st.builds(
    Traffic, st.integers(0, 100), st.integers(1, 10**5), st.integers(1, 10**5), st.none() | st.integers(1, 500)
)


@given(facts, st.sampled_from([GPU, RAM]), st.none() | st.integers(1, 512), records)
def test_least_wanted_and_most_are_in_order(
    model: ModelFacts, device: DeviceShare, sequences: int | None, record: Traffic | None
) -> None:
    need = demand(model, device, max_num_seqs=sequences, traffic=record)
    assert 0 < need.least_kv_bytes <= need.wanted_kv_bytes <= need.most_kv_bytes
    assert need.least_bytes == need.fixed_bytes + need.least_kv_bytes


@given(facts, st.sampled_from(["cuda:0", "cpu"]), st.integers(1, 200))
def test_more_memory_never_takes_a_model_away(model: ModelFacts, device: str, gib: int) -> None:
    hosts = [Host(DeviceMemory(device, size * GIB, 0), 0.92) for size in (gib, gib + 1, 2 * gib + 1)]
    # Beyond 32 GiB steps become larger, and their workspace with them.
    hosts = [host for host in hosts if (host.memory.total_bytes >= 32 * GIB) == (gib >= 32)]
    lengths = [footprint(model, host).context_within(host.usable_bytes) for host in hosts]
    for shorter, longer in pairwise(lengths):
        assert longer > 0 or shorter == 0


@pytest.mark.parametrize("sequences", [1, 16, 256, 1024])
def test_more_sequences_work_in_more_memory(sequences: int) -> None:
    memory = DeviceMemory("cuda:0", 24 * GIB, 0)
    less = footprint(R1_DISTILL, Host(memory, 0.92, max_num_seqs=sequences)).workspace
    more = footprint(R1_DISTILL, Host(memory, 0.92, max_num_seqs=2 * sequences)).workspace
    assert less.step < more.step and less.graphs <= more.graphs


def test_a_device_with_little_room_gets_smaller_steps() -> None:
    """Weights of 3.3 GiB and large steps leave nothing of 5 GiB; the engine makes the steps smaller then."""
    small = footprint(R1_DISTILL, Host(DeviceMemory("cuda:0", int(5.4 * GIB), 0), 0.92))
    large = footprint(R1_DISTILL, Host(DeviceMemory("cuda:0", 24 * GIB, 0), 0.92))
    assert small.workspace.step < large.workspace.step
