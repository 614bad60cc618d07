"""`ModelShape`: the sizes of a model's architecture, from config.json or from GGUF metadata, and what a token costs.

Pure: reads no files.  A field that is missing, or is no sensible number, is None; whether the engine can run
the model is not judged here.  Called by `store.facts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

_MAX_SIZE = 1 << 26
"""Of a context, a width or a count; no model comes near."""

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}")
_DTYPE_BYTES = {"float64": 8, "float32": 4}
_USUAL_DTYPE_BYTES = 2
_USUAL_WIDENING = 4
"""Of the hidden size in an MLP whose width config.json does not state, as in GPT-2's."""
_ENCODERS = ("bert", "xlm-roberta", "mpnet")
"""Parts of the names of architectures that read a whole text at once and keep no cache."""

_GGUF_MLA_ARCHITECTURES = ("deepseek2",)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens, widths in elements; `architecture` is the model type ("llama"), "" when not stated.

    `cached_elements` is what one token leaves in the KV cache, over all layers; None for models without one.
    `has_latent_cache` says that it is one compressed vector per layer instead of keys and values (MLA).
    `classes` are the `architectures` of config.json, `num_labels` is of models that classify, and `has_own_code` says
    that it names Python files of the repository.
    """

    architecture: str
    classes: tuple[str, ...] = ()
    context_length: int | None = None
    embedding_length: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    cached_elements: int | None = None
    has_latent_cache: bool = False
    num_experts: int | None = None
    has_sliding_window: bool = False
    activation: str | None = None
    num_labels: int | None = None
    has_own_code: bool = False
    intermediate_size: int | None = None
    vocab_size: int | None = None


def cache_bytes_per_token(shape: ModelShape, dtype: str | None) -> int | None:
    """Bytes of KV cache of one token in `dtype`, the name in config.json; 2 bytes each unless it says more.

    2 x layers x KV heads x head_dim x bytes per element for keys and values; with latent
    attention (kv_lora_rank + qk_rope_head_dim) x layers x bytes, https://arxiv.org/abs/2405.04434 §2.1.
    """
    if shape.cached_elements is None:
        return None
    return shape.cached_elements * dtype_bytes(dtype)


def dtype_bytes(dtype: str | None) -> int:
    """Bytes of an element of a type as config.json names it; 2 unless it says more."""
    return _DTYPE_BYTES.get(dtype or "", _USUAL_DTYPE_BYTES)


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """By the keys of config.json."""
    text = text_section(config)
    architecture = identifier(config.get("model_type")) or ""
    num_layers = _first_size(text, "num_hidden_layers", "n_layer", "num_layers")
    num_heads = _first_size(text, "num_attention_heads", "n_head", "num_heads")
    num_kv_heads = _first_size(text, "num_key_value_heads") or num_heads
    hidden_size = _first_size(text, "hidden_size", "n_embd", "d_model")
    head_dim = _first_size(text, "head_dim") or _quotient(hidden_size, num_heads)
    latent_rank, rope_width = _first_size(text, "kv_lora_rank"), _first_size(text, "qk_rope_head_dim")
    width = latent_rank + rope_width if latent_rank and rope_width else _product(2, num_kv_heads, head_dim)
    classes = config.get("architectures")
    layer_types = text.get("layer_types")
    return ModelShape(
        architecture=architecture,
        classes=tuple(filter(None, map(identifier, classes))) if isinstance(classes, list) else (),
        context_length=_context_length(text, architecture),
        embedding_length=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        cached_elements=None if _is_encoder(architecture) else _product(num_layers, width),
        has_latent_cache=bool(latent_rank and rope_width),
        num_experts=_first_size(text, "num_experts", "num_local_experts", "n_routed_experts"),
        has_sliding_window=text.get("use_sliding_window") is True
        or (isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types)),
        activation=identifier(text.get("hidden_act")),
        num_labels=_num_labels(config, classes),
        has_own_code=bool(config.get("auto_map")),
        intermediate_size=_first_size(text, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
        or _product(_USUAL_WIDENING, hidden_size),
        vocab_size=_first_size(text, "vocab_size"),
    )


def _context_length(text: Mapping[str, Any], architecture: str) -> int | None:
    """How many tokens the position table serves: RoBERTa counts from after the id of the padding token."""
    rows = _first_size(text, "max_position_embeddings", "n_positions", "seq_length")
    if rows is None or "roberta" not in architecture:
        return rows
    padding_id = text.get("pad_token_id")
    return size(rows - 1 - (padding_id if type(padding_id) is int else 1))


def _num_labels(config: Mapping[str, Any], classes: object) -> int | None:
    """Of a classifier, which has two unless its config says otherwise; None for models of other kinds."""
    names = classes if isinstance(classes, list) else []
    if not any(isinstance(name, str) and name.endswith("ForSequenceClassification") for name in names):
        return None
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) else size(config.get("num_labels")) or 2


def shape_of_gguf(metadata: Mapping[str, Any]) -> ModelShape:
    """By the keys of GGUF metadata; `architecture` is "" unless it is a proper name.

    Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#llm
    """
    architecture = identifier(metadata.get("general.architecture")) or ""
    fields = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    num_layers = size(fields.get("block_count"))
    num_heads = _largest(fields.get("attention.head_count"))
    kv_heads = fields.get("attention.head_count_kv", fields.get("attention.head_count"))
    embedding_length = size(fields.get("embedding_length"))
    head_dim = size(fields.get("attention.key_length")) or _quotient(embedding_length, num_heads)
    value_dim = size(fields.get("attention.value_length")) or head_dim
    latent_rank, rope_width = size(fields.get("attention.kv_lora_rank")), size(fields.get("rope.dimension_count"))
    has_latent_cache = bool(architecture in _GGUF_MLA_ARCHITECTURES and latent_rank and rope_width)
    cached_elements = None
    if has_latent_cache and latent_rank and rope_width:
        cached_elements = _product(num_layers, latent_rank + rope_width)
    elif head_dim and value_dim and not _is_encoder(architecture):
        cached_elements = _product(_over_layers(kv_heads, num_layers), head_dim + value_dim)
    return ModelShape(
        architecture=architecture,
        context_length=size(fields.get("context_length")),
        embedding_length=embedding_length,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_largest(kv_heads),
        head_dim=head_dim,
        cached_elements=cached_elements,
        has_latent_cache=has_latent_cache,
        num_experts=size(fields.get("expert_count")),
        intermediate_size=_largest(fields.get("feed_forward_length")),
        vocab_size=size(fields.get("vocab_size")),
    )


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys that are about text: a model that also sees or hears has them under `text_config`."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def identifier(value: object) -> str | None:
    """A short name that is safe to show and to compare; None for anything else."""
    return value if isinstance(value, str) and _IDENTIFIER.fullmatch(value) else None


def size(value: object) -> int | None:
    """A positive whole number of sensible size, however it is written; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 < value <= _MAX_SIZE else None


def _first_size(fields: Mapping[str, Any], *names: str) -> int | None:
    """Families name the same thing differently."""
    return next((found for name in names if (found := size(fields.get(name)))), None)


def _largest(value: object) -> int | None:
    """A number, or the largest of one per layer."""
    if isinstance(value, list):
        return max(filter(None, map(size, value)), default=None)
    return size(value)


def _over_layers(value: object, num_layers: int | None) -> int | None:
    """The sum of a number over the layers: the same for all, or listed; layers without attention have 0."""
    if isinstance(value, list):
        return sum(size(item) or 0 for item in value) or None
    return _product(num_layers, size(value))


def _product(*factors: int | None) -> int | None:
    product = 1
    for factor in factors:
        if factor is None:
            return None
        product *= factor
    return product


def _quotient(total: int | None, count: int | None) -> int | None:
    return total // count or None if total and count else None


def _is_encoder(architecture: str) -> bool:
    return any(part in architecture for part in _ENCODERS)
