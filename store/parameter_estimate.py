"""`estimated_parameters`: how many weights a model has, by its config.json alone.

For models whose weight files are not at hand: a bare config.json, or random weights.  Exact for the families that
the engine runs and for GPT-2; for others as near as their config tells, which leaves out small things such as
biases.  Pure; called by `store.facts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from store.shape import ModelShape, size

_UNGATED = frozenset({"gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2"})
"""Model types whose MLP has two matrices instead of three."""

_TIED_UNLESS_STATED = frozenset({"gpt2", "gpt_bigcode", "opt", "bloom", "falcon", "gemma", "gemma2", "gemma3_text"})
"""Model types that use the embedding as output matrix when config.json does not say so."""

_LEARNED_POSITIONS = {"gpt2": 0, "gpt_bigcode": 0, "opt": 2}
"""Model types with a table of positions, and its rows beyond the context."""


def estimated_parameters(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Of a config's text section and the shape read from it; 0 where a size that counts is missing."""
    hidden, layers, heads = shape.embedding_length, shape.num_layers, shape.num_heads
    intermediate, vocab = shape.intermediate_size, shape.vocab_size
    if not (hidden and layers and heads and intermediate and vocab):
        return 0
    if shape.cached_elements is None:
        return _encoder(config, hidden, layers, intermediate, vocab, shape.context_length or 0)
    model_type = str(config.get("model_type"))
    embeddings = vocab * hidden * (1 if _is_tied(config, model_type) else 2)
    if model_type in _LEARNED_POSITIONS:
        embeddings += ((shape.context_length or 0) + _LEARNED_POSITIONS[model_type]) * hidden
    if model_type == "gpt2":
        return embeddings + _gpt2_layers(hidden, intermediate, layers)
    norms = 2 * hidden
    return embeddings + layers * (_attention(config, shape, hidden, heads) + norms) + _mlps(config, shape) + hidden


def _is_tied(config: Mapping[str, Any], model_type: str) -> bool:
    stated = config.get("tie_word_embeddings")
    return stated if isinstance(stated, bool) else model_type in _TIED_UNLESS_STATED


def _attention(config: Mapping[str, Any], shape: ModelShape, hidden: int, heads: int) -> int:
    """The projections of one layer."""
    if shape.has_latent_cache:
        return _latent_attention(config, hidden, heads)
    head_dim, kv_heads = shape.head_dim or hidden // heads, shape.num_kv_heads or heads
    num = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    if shape.architecture.startswith("qwen2") or config.get("attention_bias") is True:
        num += (heads + 2 * kv_heads) * head_dim
    if shape.architecture.startswith("qwen3"):
        num += 2 * head_dim
    return num


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Multi-head latent attention, https://arxiv.org/abs/2405.04434 §2.1: low ranks with norms between."""
    kv_rank, rope = size(config.get("kv_lora_rank")) or 0, size(config.get("qk_rope_head_dim")) or 0
    plain, value = size(config.get("qk_nope_head_dim")) or 0, size(config.get("v_head_dim")) or 0
    q_rank, q_width = size(config.get("q_lora_rank")), heads * (plain + rope)
    queries = q_rank * (hidden + 1 + q_width) if q_rank else hidden * q_width
    return queries + hidden * (kv_rank + rope) + kv_rank * (1 + heads * (plain + value)) + heads * value * hidden


def _mlps(config: Mapping[str, Any], shape: ModelShape) -> int:
    """The MLPs of all layers; of a mixture of experts all experts, with their router."""
    hidden, layers, intermediate = shape.embedding_length or 0, shape.num_layers or 0, shape.intermediate_size or 0
    matrices = 2 if str(config.get("model_type")) in _UNGATED else 3
    dense = matrices * hidden * intermediate
    if not shape.num_experts:
        return layers * dense
    width = size(config.get("moe_intermediate_size")) or intermediate
    shared = (size(config.get("n_shared_experts")) or 0) * width
    shared += size(config.get("shared_expert_intermediate_size")) or 0
    sparse = matrices * hidden * (shape.num_experts * width + shared) + shape.num_experts * hidden
    num_dense = min(layers, size(config.get("first_k_dense_replace")) or 0)
    return num_dense * dense + (layers - num_dense) * sparse


def _gpt2_layers(hidden: int, intermediate: int, layers: int) -> int:
    """Four projections, two matrices and two norms a layer, and a last norm: everything has a bias."""
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * intermediate + intermediate + hidden + 4 * hidden
    return layers * layer + 2 * hidden


def _encoder(config: Mapping[str, Any], hidden: int, layers: int, intermediate: int, vocab: int, positions: int) -> int:
    """BERT with its pooler, as `_gpt2_layers`, and a norm after the embeddings."""
    types = size(config.get("type_vocab_size")) or 0
    embeddings = (vocab + positions + types) * hidden
    return embeddings + _gpt2_layers(hidden, intermediate, layers) + hidden * hidden + hidden
