"""The arithmetic of `quire plan`: the figures that are known from elsewhere, and what always holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.residency.advice.plan import CacheType, DevicePlan, Options, Wish, plan_device
from app.residency.advice.plan_advice import changes, notes, per_token_text
from app.residency.arithmetic.tenants import DeviceShare
from store.catalog import catalog_models
from store.catalog_facts import catalog_facts
from store.facts import ModelFacts, facts_of_checkpoint
from tests.pure.test_parameter_estimate import DEEPSEEK_V3, GPT2, LLAMA, R1_DISTILL_QWEN_1_5B, TINYLLAMA

GIB = 2**30
CARD = DeviceShare("cuda:0", 24 * GIB, 0, 0.92)


def facts_of(config: dict[str, Any], **changed: Any) -> ModelFacts:
    return facts_of_checkpoint({**config, **changed}, (), has_chat_template=False)


R1 = facts_of(R1_DISTILL_QWEN_1_5B, max_position_embeddings=131_072, dtype="bfloat16")


def plan_one(facts: ModelFacts, share: float | None = 0.9, **options: Any) -> DevicePlan:
    return plan_device([Wish("model", facts, share)], CARD, Options(**options))


@pytest.mark.parametrize(
    ("config", "dtype", "per_token"),
    [
        (R1_DISTILL_QWEN_1_5B, "bfloat16", 28_672),
        (TINYLLAMA, "float16", 22_528),
        (DEEPSEEK_V3, "bfloat16", 70_272),
        (GPT2, None, 36_864),
        (LLAMA, "float16", 512 * 1024),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_bytes_of_a_token(config: dict[str, Any], dtype: str | None, per_token: int) -> None:
    model = plan_one(facts_of(config, dtype=dtype)).models[0]
    assert model.footprint.kv_bytes_per_token == per_token
    assert model.block_bytes == 16 * per_token


def test_r1_distill_with_the_blocks_that_vllm_logs() -> None:
    """vLLM 0.8.3 on a card of 24 GB: 26,653 blocks = 426,448 tokens, 3.25x for 131,072 tokens."""
    model = plan_one(R1, num_blocks=26_653).models[0]
    assert (model.block_bytes, model.num_tokens) == (458_752, 426_448)
    assert f"{model.max_concurrency:.2f}x" == "3.25x"


def test_gpt2_with_the_tokens_that_vllm_logs() -> None:
    """vLLM 0.9.2 on a card of 23.62 GiB: 18.10 GiB of KV cache, 527,328 tokens, 1,029.94x for 512 tokens."""
    model = plan_one(facts_of(GPT2), num_blocks=32_958, max_model_len=512).models[0]
    assert model.num_tokens == 527_328
    assert f"{model.kv_bytes / GIB:.2f} {model.max_concurrency:,.2f}x" == "18.10 1,029.94x"


def test_the_share_less_weights_and_workspace_is_cache() -> None:
    model = plan_one(R1).models[0]
    assert model.budget_bytes == int(24 * GIB * 0.9)
    assert model.footprint.weight_bytes == 2 * 1_777_088_000
    left = model.budget_bytes - model.footprint.fixed_bytes
    assert model.num_blocks == left // 458_752
    assert plan_one(R1, block_size=32).models[0].num_blocks == left // (2 * 458_752)


def test_latent_attention_is_explained() -> None:
    facts = facts_of(DEEPSEEK_V3, dtype="bfloat16")
    plan = plan_one(facts)
    told = " ".join(notes(plan, is_estimate=True))
    assert "one compressed vector per layer and token (MLA)" in told
    assert "the usual sum over heads, 1,748,992 bytes a token, is 25 times too much" in told
    assert "This version does not run it." in told
    assert "follows from config.json" in told
    assert per_token_text(facts, 70_272) == "70,272 bytes = 61 layers x 576 numbers (one latent vector) x 2 bytes"
    assert changes(plan)[-1] == "No GPU of up to 288 GiB would hold it."


def test_the_sum_of_a_token_is_shown() -> None:
    expected = "28,672 bytes = 2 (keys and values) x 28 layers x 2 KV heads x 128 x 2 bytes"
    assert per_token_text(R1, 28_672) == expected
    assert per_token_text(R1, 14_336).endswith("x 1 byte")


@pytest.mark.parametrize(
    ("cache_type", "per_token"),
    [("auto", 28_672), ("float32", 57_344), ("float16", 28_672), ("fp8", 14_336), ("int8", 14_336)],
)  # fmt: skip
def test_types_of_the_cache(cache_type: CacheType, per_token: int) -> None:
    plan = plan_one(R1, cache_type=cache_type)
    assert plan.models[0].footprint.kv_bytes_per_token == per_token
    says_so = any(f"does not keep a KV cache in {cache_type} yet" in note for note in notes(plan, is_estimate=False))
    assert says_so == (cache_type in ("fp8", "int8"))


def test_in_ram_the_cache_is_float32_and_both_figures_are_told() -> None:
    ram = DeviceShare("cpu", 24 * GIB, 0, 0.92)
    plan = plan_device([Wish("model", R1)], ram, Options())
    assert plan.models[0].footprint.kv_bytes_per_token == 57_344
    assert "in the model's own bfloat16 it is 28,672 bytes" in notes(plan, is_estimate=False)[0]


def wish(name: str, share: float | None = None) -> Wish:
    return Wish(name, catalog_facts(catalog_models()[name]), share)


def test_a_context_that_does_not_fit_is_shortened_and_told() -> None:
    plan = plan_device([wish("llama3.1:8b")], CARD, Options())
    model = plan.models[0]
    assert plan.fits and model.served_len == model.num_tokens < model.max_model_len == 131_072
    told = changes(plan)
    assert f"`--max-model-len {model.served_len}`" in told[0]
    assert told[1] == "A GPU of 40 GiB would hold the whole context."
    again = plan_device([wish("llama3.1:8b")], CARD, Options(max_model_len=model.served_len))
    assert changes(again) == []


def test_a_share_that_is_enough_for_the_whole_context_is_named() -> None:
    plan = plan_device([wish("qwen3:4b", 0.5)], CARD, Options())
    told = changes(plan)[1]
    assert told.startswith("A share of 0.") and "is enough for the whole context" in told
    share = float(told.split()[3])
    assert changes(plan_device([wish("qwen3:4b", share)], CARD, Options())) == []
    assert changes(plan_device([wish("qwen3:4b", round(share - 0.01, 2))], CARD, Options())) != []


def test_what_does_not_fit_says_what_would() -> None:
    card = DeviceShare("cuda:0", 8 * GIB, 0, 0.92)
    told = changes(plan_device([wish("qwen2.5:3b")], card, Options()))
    assert told[0].startswith("qwen2.5:3b needs at least 8.6 GB and models may have 7.9 GB of cuda:0 in all;")
    assert told[1:] == [
        "With `--max-num-seqs 16`, enough for one person, it fits.",
        "A GPU of 10 GiB would hold it.",
    ]


def test_models_beside_one_another() -> None:
    plan = plan_device([wish("qwen3:4b", 0.65), wish("qwen3-embedding:0.6b", 0.25)], CARD, Options())
    assert plan.fits
    assert [round(model.held_bytes / plan.device.total_bytes, 2) for model in plan.models] == [0.65, 0.25]
    crowded = plan_device([wish("qwen3:4b", 0.7), wish("qwen3-embedding:0.6b", 0.25)], CARD, Options())
    assert not crowded.fits
    assert changes(crowded) == [
        "The shares come to 0.95, above the 0.92 that models may have; give qwen3:4b at most 0.67."
    ]
    beside = plan_device([wish("qwen3:4b", 0.7), wish("qwen3-embedding:0.6b")], CARD, Options())
    assert changes(beside)[:2] == [
        "qwen3:4b needs 18.0 GB (its share of 0.7) and the other models leave 15.9 GB; "
        "there is room for a share of 0.61.",
        "Without the other models it fits.",
    ]


def test_the_first_model_gets_what_the_others_leave() -> None:
    alone = plan_device([wish("qwen3:4b")], CARD, Options()).models[0]
    plan = plan_device([wish("qwen3:4b"), wish("all-minilm:l6")], CARD, Options())
    assert plan.models[0].budget_bytes == alone.budget_bytes - plan.models[1].held_bytes


def test_another_model_without_room_is_named() -> None:
    plan = plan_device([wish("qwen3:4b"), wish("qwen3:32b")], CARD, Options())
    assert not plan.fits
    assert changes(plan)[0].startswith("qwen3:32b needs at least")


def test_more_blocks_than_there_is_memory_for() -> None:
    plan = plan_one(R1, num_blocks=100_000)
    assert not plan.fits
    assert "plan fewer blocks, or more memory" in changes(plan)[0]


names = st.sampled_from(["smollm2:135m", "qwen3:0.6b", "qwen3:8b", "qwen3:32b", "all-minilm:l6", "llama3.1:8b"])
wishes = st.builds(wish, names, st.none() | st.sampled_from([0.1, 0.25, 0.5, 0.9]))


@given(
    st.lists(wishes, min_size=1, max_size=4, unique_by=lambda one: one.name),
    st.sampled_from(["cuda:0", "cpu"]),
    st.floats(0.5, 200),
    st.none() | st.integers(16, 40_000),
    st.sampled_from([16, 32, 64]),
)
def test_the_parts_add_up(several: list[Wish], device: str, gib: float, length: int | None, block_size: int) -> None:
    target = DeviceShare(device, int(gib * GIB), 0, 0.92)
    plan = plan_device(several, target, Options(max_model_len=length, block_size=block_size))
    assert plan.held_bytes <= target.limit_bytes
    for model in plan.models:
        assert model.held_bytes <= model.budget_bytes
        assert model.refusal is None or model.num_blocks == 0
        assert model.served_len <= model.max_model_len
        assert model.num_tokens == model.num_blocks * model.block_size
        if model.share is not None and model.refusal is None:
            assert model.budget_bytes <= target.share_bytes(model.share)
        if model.num_tokens:
            assert model.max_concurrency == model.num_tokens / model.served_len >= 1
    told = (*changes(plan), *notes(plan, is_estimate=False))
    assert all(sentence.endswith(".") for sentence in told)
    assert plan.fits or changes(plan)
