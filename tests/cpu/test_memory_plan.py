"""KV cache sizing: the arithmetic users check by hand."""

from __future__ import annotations

import pytest
import torch

from engine.api.errors import InsufficientMemory
from engine.attention.backend import CacheSpec
from engine.runner.memory import GIB, plan_cache

R1_DISTILL_QWEN_1_5B = CacheSpec(num_layers=28, num_kv_heads=2, head_dim=128, block_size=16, dtype=torch.bfloat16)


def test_bytes_per_token_of_known_models():
    assert R1_DISTILL_QWEN_1_5B.bytes_per_token == 28_672
    assert R1_DISTILL_QWEN_1_5B.bytes_per_block == 458_752
    assert CacheSpec(22, 4, 64, 16, torch.float16).bytes_per_token == 22_528  # TinyLlama
    assert CacheSpec(32, 32, 128, 16, torch.float16).bytes_per_token == 512 * 1024  # a 7B with 32 KV heads


def test_the_cache_is_what_weights_and_workspace_leave():
    plan = plan_cache(
        R1_DISTILL_QWEN_1_5B, budget_bytes=24 * GIB, used_bytes=4 * GIB, max_num_seqs=256, max_model_len=131_072
    )
    assert plan.num_blocks == 20 * GIB // 458_752
    assert plan.max_model_len == 131_072
    assert plan.notes == ()


def test_the_cache_is_never_larger_than_all_sequences_can_use():
    plan = plan_cache(R1_DISTILL_QWEN_1_5B, budget_bytes=24 * GIB, used_bytes=0, max_num_seqs=2, max_model_len=1000)
    assert plan.num_blocks == 2 * 63


def test_a_small_cache_shrinks_the_context_and_says_so():
    plan = plan_cache(
        R1_DISTILL_QWEN_1_5B, budget_bytes=10 * 458_752, used_bytes=0, max_num_seqs=8, max_model_len=32_768
    )
    assert (plan.num_blocks, plan.max_model_len) == (10, 160)
    assert "160" in plan.notes[0]
    assert "32,768" in plan.notes[0]


def test_no_room_for_a_block_is_an_error_that_names_both_sizes():
    with pytest.raises(InsufficientMemory, match=r"1\.00 GiB.*2\.00 GiB"):
        plan_cache(R1_DISTILL_QWEN_1_5B, budget_bytes=GIB, used_bytes=2 * GIB, max_num_seqs=1, max_model_len=16)


def test_an_explicit_number_of_blocks_wins():
    plan = plan_cache(
        R1_DISTILL_QWEN_1_5B, budget_bytes=1, used_bytes=GIB, max_num_seqs=4, max_model_len=64, num_blocks=7
    )
    assert plan.num_blocks == 7
