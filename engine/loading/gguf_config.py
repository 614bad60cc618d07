"""GGUF metadata -> a config dict with the keys of Hugging Face's config.json.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#standardized-key-value-pairs
What GGUF leaves implicit (biases, tied head, vocabulary size) is read off the tensor table.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.api.architectures import unsupported_architecture, unsupported_experts
from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from store.formats.gguf import GgufHeader

_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_ATTENTION_FACTOR_KEYS = ("attn_factor", "yarn_attn_factor")
_DTYPE_NAMES = {"F32": "float32", "F16": "float16"}


def config_from_gguf(header: GgufHeader, frequency_factors: tuple[float, ...] | None) -> dict[str, Any]:
    """Translate the metadata; `frequency_factors` are the values of the tensor `rope_freqs.weight`, if present.

    Most values are passed on unchecked: the model's config class checks them.  Raises `UnsupportedModel`
    or `BrokenCheckpoint`.
    """
    metadata, tensors = header.metadata, header.tensors
    architecture = str(metadata.get("general.architecture", ""))
    fields = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    _refuse_unsupported(architecture, fields)
    config: dict[str, Any] = {hf: fields[gguf] for gguf, hf in _FIELDS.items() if gguf in fields}
    config["model_type"] = architecture
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if embedding := tensors.get("token_embd.weight"):
        config["vocab_size"] = embedding.shape[0]
    config["head_dim"] = _head_dim(fields)
    config["rope_parameters"] = _rope_parameters(fields, config["head_dim"], frequency_factors)
    config["dtype"] = _dtype_name(header)
    for kind in ("bos", "eos"):
        if (token_id := metadata.get(f"tokenizer.ggml.{kind}_token_id")) is not None:
            config[f"{kind}_token_id"] = token_id
    return config


def _refuse_unsupported(architecture: str, fields: dict[str, Any]) -> None:
    if reason := unsupported_architecture(architecture, (), is_gguf=True):
        raise UnsupportedModel(reason)
    if reason := unsupported_experts(fields.get("expert_count")):
        raise UnsupportedModel(reason)
    if fields.get("attention.value_length", fields.get("attention.key_length")) != fields.get("attention.key_length"):
        raise UnsupportedModel("Values of another width than keys are not supported; choose another model.")


def _head_dim(fields: dict[str, Any]) -> int:
    head_dim = fields.get("attention.key_length")
    if head_dim is None:
        hidden_size, num_heads = fields.get("embedding_length"), fields.get("attention.head_count")
        if isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0:
            head_dim = hidden_size // num_heads
    if type(head_dim) is not int or head_dim < 1:
        raise BrokenCheckpoint("The GGUF metadata does not say how wide a head is; pull the model again.")
    return head_dim


def _rope_parameters(
    fields: dict[str, Any], head_dim: int, frequency_factors: tuple[float, ...] | None
) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base", 10_000.0)}
    if fields.get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel("Rotating only part of each head is not supported; choose another model.")
    kind = fields.get("rope.scaling.type", "linear" if "rope.scale_linear" in fields else "none")
    odd_attention_factor = any(fields.get(f"rope.scaling.{key}", 1.0) != 1.0 for key in _ATTENTION_FACTOR_KEYS)
    if odd_attention_factor or (kind != "none" and frequency_factors is not None):
        raise UnsupportedModel("This combination of rope scaling settings is not supported; choose another model.")
    if frequency_factors is not None:
        rope |= {"rope_type": "factors", "frequency_factors": frequency_factors}
    elif kind != "none":
        rope["rope_type"] = kind
        rope["factor"] = fields.get("rope.scaling.factor", fields.get("rope.scale_linear"))
        rope["original_max_position_embeddings"] = fields.get("rope.scaling.original_context_length")
        rope["beta_fast"] = fields.get("rope.scaling.yarn_beta_fast")
        rope["beta_slow"] = fields.get("rope.scaling.yarn_beta_slow")
    return rope


def _dtype_name(header: GgufHeader) -> str:
    """The float type that holds most bytes; quantised weights were trained in bfloat16 or are as good in it."""
    num_bytes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        num_bytes[tensor.type_name] += tensor.num_bytes
    return _DTYPE_NAMES.get(max(num_bytes, key=num_bytes.__getitem__, default=""), "bfloat16")
