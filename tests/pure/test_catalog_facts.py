"""The figures of the catalogue follow from the shapes in each repository's config.json."""

from __future__ import annotations

import pytest

from store.catalog import catalog_models, distinct_models
from store.catalog_facts import catalog_facts

QWEN3 = {"head_dim": 128, "has_qk_norm": True}
QWEN2 = {"has_bias": True}
TIED = {"is_tied": True}
NO_HEAD = {"is_tied": True}
"""An embedder has no output matrix, which counts like one that is shared with the input."""

# name: hidden_size, intermediate_size, layers, heads, KV heads, vocab_size, and what is out of the ordinary
DENSE = {
    "smollm2:135m": (576, 1536, 30, 9, 3, 49152, TIED),
    "smollm2:360m": (960, 2560, 32, 15, 5, 49152, TIED),
    "smollm2:1.7b": (2048, 8192, 24, 32, 32, 49152, TIED),
    "smollm3:3b": (2048, 11008, 36, 16, 4, 128256, TIED),
    "tinyllama": (2048, 5632, 22, 32, 4, 32000, {}),
    "llama3.2:1b": (2048, 8192, 16, 32, 8, 128256, TIED),
    "llama3.2:3b": (3072, 8192, 28, 24, 8, 128256, TIED),
    "llama3.1:8b": (4096, 14336, 32, 32, 8, 128256, {}),
    "llama3.3:70b": (8192, 28672, 80, 64, 8, 128256, {}),
    "qwen3:0.6b": (1024, 3072, 28, 16, 8, 151936, QWEN3 | TIED),
    "qwen3:1.7b": (2048, 6144, 28, 16, 8, 151936, QWEN3 | TIED),
    "qwen3:4b": (2560, 9728, 36, 32, 8, 151936, QWEN3 | TIED),
    "qwen3:8b": (4096, 12288, 36, 32, 8, 151936, QWEN3),
    "qwen3:14b": (5120, 17408, 40, 40, 8, 151936, QWEN3),
    "qwen3:32b": (5120, 25600, 64, 64, 8, 151936, QWEN3),
    "qwen3-embedding:0.6b": (1024, 3072, 28, 16, 8, 151669, QWEN3 | TIED),
    "qwen3-embedding:8b": (4096, 12288, 36, 32, 8, 151665, QWEN3 | NO_HEAD),
    "qwen2.5:0.5b": (896, 4864, 24, 14, 2, 151936, QWEN2 | TIED),
    "qwen2.5:1.5b": (1536, 8960, 28, 12, 2, 151936, QWEN2 | TIED),
    "qwen2.5:3b": (2048, 11008, 36, 16, 2, 151936, QWEN2 | TIED),
    "qwen2.5:7b": (3584, 18944, 28, 28, 4, 152064, QWEN2),
    "qwen2.5:14b": (5120, 13824, 48, 40, 8, 152064, QWEN2),
    "qwen2.5:32b": (5120, 27648, 64, 40, 8, 152064, QWEN2),
    "qwen2.5:72b": (8192, 29568, 80, 64, 8, 152064, QWEN2),
    "deepseek-r1:1.5b": (1536, 8960, 28, 12, 2, 151936, QWEN2),
    "mistral:7b": (4096, 14336, 32, 32, 8, 32768, {}),
    "mistral-nemo:12b": (5120, 14336, 40, 32, 8, 131072, {"head_dim": 128}),
    "mistral-small:24b": (5120, 32768, 40, 32, 8, 131072, {"head_dim": 128}),
    "phi3.5:3.8b": (3072, 8192, 32, 32, 32, 32064, {}),
    "phi4:14b": (5120, 17920, 40, 40, 10, 100352, {}),
    "phi4-mini:3.8b": (3072, 8192, 32, 24, 8, 200064, TIED),
}

# hidden_size, intermediate_size, layers, vocab_size, positions, token types
ENCODERS = {
    "all-minilm:l6": (384, 1536, 6, 30522, 512, 2),
    "bge-small-en": (384, 1536, 12, 30522, 512, 2),
    "bge-base-en": (768, 3072, 12, 30522, 512, 2),
    "bge-large-en": (1024, 4096, 24, 30522, 512, 2),
    "multilingual-e5:small": (384, 1536, 12, 250037, 512, 2),
    "multilingual-e5:base": (768, 3072, 12, 250002, 514, 1),
    "multilingual-e5:large": (1024, 4096, 24, 250002, 514, 1),
}


def decoder_parameters(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    *,
    head_dim: int = 0,
    is_tied: bool = False,
    has_bias: bool = False,
    has_qk_norm: bool = False,
) -> int:
    """Embedding and head; per layer: four projections of attention, three of the MLP, two norms; the last norm."""
    head_dim = head_dim or hidden // heads
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    attention += (heads + 2 * kv_heads) * head_dim * has_bias + 2 * head_dim * has_qk_norm
    return (2 - is_tied) * vocab * hidden + layers * (attention + 3 * hidden * intermediate + 2 * hidden) + hidden


def encoder_parameters(hidden: int, intermediate: int, layers: int, vocab: int, positions: int, types: int) -> int:
    """BERT with its pooler: everything has a bias."""
    embeddings = (vocab + positions + types) * hidden + 2 * hidden
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * intermediate + intermediate + hidden + 4 * hidden
    return embeddings + layers * layer + hidden * hidden + hidden


@pytest.mark.parametrize("name", DENSE)
def test_parameters_of_decoders(name: str) -> None:
    *sizes, unusual = DENSE[name]
    hidden, _, layers, heads, kv_heads, _ = sizes
    model = catalog_models()[name]
    assert model.parameters == decoder_parameters(*sizes, **unusual)
    assert (model.layers, model.kv_heads) == (layers, kv_heads)
    assert model.head_dim == unusual.get("head_dim", hidden // heads)


@pytest.mark.parametrize("name", ENCODERS)
def test_parameters_of_encoders(name: str) -> None:
    model = catalog_models()[name]
    assert model.parameters == encoder_parameters(*ENCODERS[name])
    assert catalog_facts(model).kv_bytes_per_token is None


def test_models_of_one_shape_have_one_size() -> None:
    twins = [("deepseek-r1:7b", "qwen2.5:7b"), ("deepseek-r1:8b", "llama3.1:8b"), ("deepseek-r1:8b-0528", "qwen3:8b"),
             ("qwen2.5-coder:14b", "qwen2.5:14b"), ("qwen3:4b-instruct-2507", "qwen3:4b")]  # fmt: skip
    models = catalog_models()
    for one, other in twins:
        assert (models[one].parameters, models[one].layers) == (models[other].parameters, models[other].layers)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("tinyllama", 22_528), ("deepseek-r1:1.5b", 28_672), ("qwen3:8b", 147_456), ("llama3.1:8b", 131_072)],
)
def test_cache_of_a_token(name: str, expected: int) -> None:
    assert catalog_facts(catalog_models()[name]).kv_bytes_per_token == expected


def test_files_take_what_their_type_says() -> None:
    """Between 0.5 and 1.1 bytes a parameter when quantised; the two Qwen3 that store a tied matrix twice take more."""
    for model in distinct_models():
        facts = catalog_facts(model)
        per_parameter = facts.weight_bytes / facts.num_parameters
        if facts.format == "gguf":
            assert 0.5 < per_parameter < 1.1, model.name
        elif model.name in ("qwen3:0.6b", "qwen3:1.7b"):
            assert 2 < per_parameter < 2.6
        else:
            assert per_parameter == (4 if model.dtype == "float32" else 2), model.name
