"""How a device's memory is split: the arithmetic users check by hand, and what holds for any figures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.api.config import EngineConfig
from engine.api.errors import InsufficientMemory
from engine.attention.backend import CacheSpec
from engine.runner import device as devices
from engine.runner.memory import (
    GIB,
    MIB,
    OUTSIDE_BYTES_GUESS,
    CachePlan,
    MemoryUse,
    absolute_budget_bytes,
    choose_outside_bytes,
    plan_cache,
)

CPU = torch.device("cpu")
R1_DISTILL_QWEN_1_5B = CacheSpec(num_layers=28, num_kv_heads=2, head_dim=128, block_size=16, dtype=torch.bfloat16)
BLOCK_BYTES = 458_752


def test_bytes_per_token_of_known_models():
    assert R1_DISTILL_QWEN_1_5B.bytes_per_token == 28_672
    assert R1_DISTILL_QWEN_1_5B.bytes_per_block == BLOCK_BYTES
    assert CacheSpec(22, 4, 64, 16, torch.float16).bytes_per_token == 22_528  # TinyLlama
    assert CacheSpec(32, 32, 128, 16, torch.float16).bytes_per_token == 512 * 1024  # a 7B with 32 KV heads


def test_the_cache_is_what_weights_and_workspace_leave():
    plan = plan_cache(
        R1_DISTILL_QWEN_1_5B, budget_bytes=24 * GIB, used_bytes=4 * GIB, max_num_seqs=256, max_model_len=131_072
    )
    assert plan.num_blocks == 20 * GIB // BLOCK_BYTES
    assert plan.max_model_len == 131_072
    assert plan.notes == ()


def test_the_cache_is_never_larger_than_all_sequences_can_use():
    plan = plan_cache(R1_DISTILL_QWEN_1_5B, budget_bytes=24 * GIB, used_bytes=0, max_num_seqs=2, max_model_len=1000)
    assert plan.num_blocks == 2 * 63


def test_a_small_cache_shrinks_the_context_and_says_so():
    plan = plan_cache(
        R1_DISTILL_QWEN_1_5B, budget_bytes=10 * BLOCK_BYTES, used_bytes=0, max_num_seqs=8, max_model_len=32_768
    )
    assert (plan.num_blocks, plan.max_model_len) == (10, 160)
    assert "160" in plan.notes[0]
    assert "32,768" in plan.notes[0]


def test_a_cache_may_grow_as_far_as_the_device_goes_or_all_sequences_need():
    def plan(max_num_seqs: int, device_bytes: int) -> CachePlan:
        return plan_cache(
            R1_DISTILL_QWEN_1_5B,
            budget_bytes=GIB + 10 * BLOCK_BYTES,
            used_bytes=GIB,
            max_num_seqs=max_num_seqs,
            max_model_len=32_768,
            device_bytes=device_bytes,
        )

    grown = plan(8, 2 * GIB)
    assert (grown.num_blocks, grown.max_model_len) == (10, 160)
    assert (grown.max_blocks, grown.longest_model_len) == (GIB // BLOCK_BYTES, 32_768)
    assert grown.fixed_bytes == GIB
    assert plan(2, 80 * GIB).max_blocks == 2 * 2048
    fixed = plan(8, 0)
    assert (fixed.max_blocks, fixed.longest_model_len) == (10, 160)


def test_no_room_for_a_block_is_an_error_that_names_both_sizes():
    with pytest.raises(InsufficientMemory, match=r"1\.00 GiB.*2\.00 GiB"):
        plan_cache(R1_DISTILL_QWEN_1_5B, budget_bytes=GIB, used_bytes=2 * GIB, max_num_seqs=1, max_model_len=16)


def test_an_explicit_number_of_blocks_wins():
    plan = plan_cache(
        R1_DISTILL_QWEN_1_5B, budget_bytes=1, used_bytes=GIB, max_num_seqs=4, max_model_len=64, num_blocks=7
    )
    assert plan.num_blocks == 7


def plan_with_reach(reachable_bytes: int | None, max_num_seqs: int = 256) -> CachePlan:
    return plan_cache(
        R1_DISTILL_QWEN_1_5B,
        budget_bytes=24 * GIB,
        used_bytes=4 * GIB,
        max_num_seqs=max_num_seqs,
        max_model_len=4096,
        reachable_bytes=reachable_bytes,
    )


def test_where_others_hold_the_device_the_cache_shrinks_and_says_so():
    plan = plan_with_reach(14 * GIB)
    assert plan.num_blocks == 10 * GIB // BLOCK_BYTES
    assert plan.max_model_len == 4096
    assert plan.notes == (
        "The device has less free memory than the budget allows, so the KV cache gets 10.00 GiB instead of 20.00.",
    )


def test_a_device_with_room_to_spare_changes_nothing():
    assert plan_with_reach(40 * GIB) == plan_with_reach(None)
    assert plan_with_reach(14 * GIB, max_num_seqs=8) == plan_with_reach(None, max_num_seqs=8)


def test_others_that_leave_no_block_are_named():
    with pytest.raises(InsufficientMemory, match=r"Other programs leave 3\.00 GiB"):
        plan_with_reach(3 * GIB)


sizes = st.integers(0, 64 * GIB)
specs = st.builds(
    CacheSpec,
    num_layers=st.integers(1, 80),
    num_kv_heads=st.integers(1, 32),
    head_dim=st.sampled_from([64, 96, 128, 256]),
    block_size=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
uses = st.builds(MemoryUse, weights=sizes, workspace_peak=sizes, graphs_reserve=sizes, outside=sizes)


@given(
    spec=specs,
    use=uses,
    budget_bytes=st.integers(0, 300 * GIB),
    more_bytes=sizes,
    reachable_bytes=st.none() | st.integers(0, 300 * GIB),
    max_num_seqs=st.integers(1, 512),
    max_model_len=st.integers(1, 131_072),
)
def test_parts_fit_the_budget_and_the_device_and_grow_with_the_budget(
    spec, use, budget_bytes, more_bytes, reachable_bytes, max_num_seqs, max_model_len
):
    def plan(budget: int, reachable: int | None) -> CachePlan:
        return plan_cache(
            spec,
            budget_bytes=budget,
            used_bytes=use.total_bytes,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            reachable_bytes=reachable,
        )

    limits = [budget_bytes] if reachable_bytes is None else [budget_bytes, reachable_bytes]
    one_block_fits = all(limit - use.total_bytes >= spec.bytes_per_block for limit in limits)
    if not one_block_fits:
        with pytest.raises(InsufficientMemory):
            plan(budget_bytes, reachable_bytes)
        return
    got = plan(budget_bytes, reachable_bytes)
    assert use.total_bytes + got.num_blocks * spec.bytes_per_block <= min(limits)
    assert 1 <= got.max_model_len <= min(max_model_len, got.num_blocks * spec.block_size)
    assert got.num_blocks <= max_num_seqs * -(-max_model_len // spec.block_size)

    assert (got.max_blocks, got.longest_model_len) == (got.num_blocks, got.max_model_len)

    larger = plan(budget_bytes + more_bytes, reachable_bytes)
    assert larger.num_blocks >= got.num_blocks
    assert larger.max_model_len >= got.max_model_len

    shrunk = got.num_blocks < plan(budget_bytes, None).num_blocks
    assert len(got.notes) == shrunk + (got.max_model_len < max_model_len)


def test_the_budget_is_a_share_of_the_device_unless_given():
    assert absolute_budget_bytes(1001, 0.9, None) == 900
    assert absolute_budget_bytes(1001, 0.9, 17) == 17
    assert devices.memory_budget_bytes(EngineConfig(model="m", memory_budget_bytes=5), CPU) == 5
    half = devices.memory_budget_bytes(EngineConfig(model="m", gpu_memory_utilization=0.5), CPU)
    assert half == devices.total_memory_bytes(CPU) // 2


@pytest.mark.parametrize(
    ("process_bytes", "growth_bytes", "expected"),
    [
        (10 * GIB + 500 * MIB, 30 * GIB, 500 * MIB),  # the driver's own figure comes first
        (None, 10 * GIB + 450 * MIB, 450 * MIB),  # a container without it
        (0, 10 * GIB + 450 * MIB, 450 * MIB),
        (3 * GIB, 10 * GIB + 450 * MIB, 450 * MIB),  # another process with our number
        (None, 16 * GIB, OUTSIDE_BYTES_GUESS),  # another program grew meanwhile
        (None, 10 * GIB, OUTSIDE_BYTES_GUESS),  # or shrank
        (None, None, OUTSIDE_BYTES_GUESS),
    ],
)
def test_what_the_driver_holds_comes_from_the_first_figure_that_can_be_true(process_bytes, growth_bytes, expected):
    assert choose_outside_bytes(10 * GIB, process_bytes, growth_bytes) == expected


def test_a_cpu_has_nothing_outside_and_no_figure_of_its_own():
    assert devices.measure_outside_bytes(CPU) == 0
    assert devices.device_memory_in_use(CPU) is None
    assert devices.reachable_memory_bytes(CPU, 0) is None


def test_what_this_process_holds_is_measured_where_the_system_tells():
    before = devices.own_memory_bytes()
    held = bytearray(b"x") * (64 * MIB)
    assert devices.own_memory_bytes() - before > 32 * MIB
    assert len(held) == 64 * MIB


def test_a_gpu_without_a_working_nvml_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(device: object = None) -> int:
        raise RuntimeError("cuda driver can't be loaded, is cuda enabled?")

    monkeypatch.setattr(torch.cuda, "device_memory_used", no_driver)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(devices, "_process_memory_bytes", lambda device: None)
    gpu = torch.device("cuda")
    assert devices.device_memory_in_use(gpu) is None
    assert devices.measure_outside_bytes(gpu, in_use_before=GIB) == OUTSIDE_BYTES_GUESS


def test_the_split_is_one_line():
    use = MemoryUse(weights=15 * GIB, workspace_peak=GIB, graphs_reserve=GIB // 2, outside=GIB // 2)
    assert use.describe(budget_bytes=100 * GIB, cache_bytes=83 * GIB) == (
        "Memory budget 100.00 GiB: weights 15.00, workspace 1.00, graphs 0.50, driver and libraries 0.50, "
        "KV cache 83.00 GiB"
    )
