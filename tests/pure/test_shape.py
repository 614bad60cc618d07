"""What a token costs in the KV cache, for configs as their publishers wrote them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.shape import ModelShape, cache_bytes_per_token, shape_of_config, shape_of_gguf

TINYLLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048, "hidden_act": "silu",
}  # fmt: skip
R1_DISTILL_QWEN_1_5B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 131072,
    "use_sliding_window": False, "sliding_window": 4096,
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256,
}  # fmt: skip
GEMMA_3 = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
                    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                    "max_position_embeddings": 131072},
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}  # fmt: skip
LLAMA_7B = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, 512),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 8194, "pad_token_id": 1}, 8192),
        ({"model_type": "roberta", "max_position_embeddings": 130}, 128),
        ({"model_type": "roberta", "max_position_embeddings": 2}, None),
    ],
)
def test_roberta_counts_positions_from_after_the_padding(config: dict[str, Any], expected: int | None) -> None:
    assert shape_of_config(config).context_length == expected


@pytest.mark.parametrize(
    ("config", "dtype", "num_bytes"),
    [
        (TINYLLAMA, "float16", 22_528),
        (R1_DISTILL_QWEN_1_5B, "bfloat16", 28_672),
        (R1_DISTILL_QWEN_1_5B, None, 28_672),
        (DEEPSEEK_V3, "bfloat16", 70_272),
        (LLAMA_7B, "float16", 512 * 1024),
        (LLAMA_7B, "float32", 1024 * 1024),
        (GPT2, "float16", 36_864),
        (GEMMA_3, "bfloat16", 139_264),
    ],
)
def test_bytes_of_a_cached_token(config: dict[str, Any], dtype: str | None, num_bytes: int) -> None:
    assert cache_bytes_per_token(shape_of_config(config), dtype) == num_bytes


def test_the_text_part_of_a_model_that_sees_is_what_counts() -> None:
    shape = shape_of_config(GEMMA_3)
    assert (shape.architecture, shape.num_layers, shape.embedding_length) == ("gemma3", 34, 2560)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.context_length) == (8, 4, 256, 131072)


def test_latent_attention_is_told_apart() -> None:
    shape = shape_of_config(DEEPSEEK_V3)
    assert (shape.has_latent_cache, shape.num_experts) == (True, 256)
    assert not shape_of_config(TINYLLAMA).has_latent_cache


def test_encoders_keep_no_cache() -> None:
    config = {"model_type": "xlm-roberta", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
    assert shape_of_config(config).cached_elements is None


def test_a_window_that_is_not_used_is_no_sliding_window() -> None:
    assert not shape_of_config(R1_DISTILL_QWEN_1_5B).has_sliding_window
    assert shape_of_config({**R1_DISTILL_QWEN_1_5B, "use_sliding_window": True}).has_sliding_window
    assert shape_of_config({"layer_types": ["full_attention", "sliding_attention"]}).has_sliding_window


def gguf_metadata(architecture: str, **fields: Any) -> dict[str, Any]:
    named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in fields.items()}
    return {"general.architecture": architecture, **named}


QWEN2_GGUF = gguf_metadata(
    "qwen2", block_count=28, embedding_length=1536, context_length=131072,
    attention__head_count=12, attention__head_count_kv=2,
)  # fmt: skip
DEEPSEEK_GGUF = gguf_metadata(
    "deepseek2", block_count=61, embedding_length=7168, attention__head_count=128, attention__head_count_kv=128,
    attention__key_length=192, attention__value_length=128, attention__kv_lora_rank=512, rope__dimension_count=64,
)  # fmt: skip
LISTED_GGUF = gguf_metadata(
    "openelm", block_count=3, attention__head_count=[12, 16, 16], attention__head_count_kv=[3, 0, 4],
    attention__key_length=64, attention__value_length=64,
)  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "num_bytes"), [(QWEN2_GGUF, 28_672), (DEEPSEEK_GGUF, 70_272), (LISTED_GGUF, 2 * 7 * 128)]
)
def test_bytes_of_a_cached_token_by_gguf_metadata(metadata: dict[str, Any], num_bytes: int) -> None:
    assert cache_bytes_per_token(shape_of_gguf(metadata), "bfloat16") == num_bytes


ODD_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(sorted(DEEPSEEK_V3)), st.integers(), max_size=3),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from([*DEEPSEEK_V3, "text_config", "layer_types", "head_dim"]), ODD_VALUES))
def test_nonsense_in_a_config_leaves_fields_unknown(config: dict[str, Any]) -> None:
    check(shape_of_config(config))


@given(st.dictionaries(st.sampled_from(sorted(DEEPSEEK_GGUF)), ODD_VALUES))
def test_nonsense_in_gguf_metadata_leaves_fields_unknown(metadata: dict[str, Any]) -> None:
    check(shape_of_gguf({**metadata, "general.architecture": "deepseek2"}))


def check(shape: ModelShape) -> None:
    sizes = (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.cached_elements)
    assert all(size is None or size > 0 for size in sizes)


@pytest.mark.parametrize("name", ["../llama", "a\x00b", "\x1b[31mllama", "x" * 200, 7, None])
def test_a_name_that_is_not_safe_to_show_is_none(name: object) -> None:
    assert shape_of_config({"model_type": name}).architecture == ""
    assert shape_of_gguf({"general.architecture": name}).architecture == ""
