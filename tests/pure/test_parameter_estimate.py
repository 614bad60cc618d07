"""The number of weights by config.json alone, beside what the publishers' files hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.facts import facts_of_checkpoint

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000,
}  # fmt: skip
TINYLLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
R1_DISTILL_QWEN_1_5B = {
    "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_06B = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
MINILM = {
    "model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
    "intermediate_size": 1536, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8, "vocab_size": 32000,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 129280,
    "tie_word_embeddings": False,
}  # fmt: skip


def parameters(config: dict[str, Any]) -> int:
    return facts_of_checkpoint(config, (), has_chat_template=False).num_parameters


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 6_738_415_616),
        (TINYLLAMA, 1_100_048_384),
        (R1_DISTILL_QWEN_1_5B, 1_777_088_000),
        (QWEN3_06B, 596_049_920),
        (GPT2, 124_439_808),
        (MINILM, 22_713_216),
        (MIXTRAL, 46_702_792_704),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_families_whose_number_is_known_exactly(config: dict[str, Any], expected: int) -> None:
    assert parameters(config) == expected


def test_deepseek_v3_has_671_billion() -> None:
    """All but the corrections of the router, 256 numbers a layer."""
    assert parameters(DEEPSEEK_V3) + 58 * 256 == 671_026_419_200


def test_the_bytes_follow_from_the_dtype() -> None:
    facts = facts_of_checkpoint({**GPT2, "dtype": "float32"}, (), has_chat_template=False)
    assert facts.weight_bytes == 4 * 124_439_808


@given(st.sampled_from(sorted(DEEPSEEK_V3)), st.sampled_from([None, -1, "x", 1.5, {}]))
def test_a_size_that_is_missing_or_nonsense_is_no_failure(key: str, value: object) -> None:
    assert parameters({**DEEPSEEK_V3, key: value}) >= 0
    assert parameters({**LLAMA, "vocab_size": value}) == 0
