"""`DecoderConfig`: the shape of a dense decoder, read from a checkpoint's config dict.

Fields every family shares are read here; what differs (biases, q/k norms, defaults) is
passed in by the family's own file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.api.architectures import (
    HEADLESS_DECODERS,
    unsupported_activation,
    unsupported_quantization,
    unsupported_window,
)
from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.layers.rotary import RopeConfig
from engine.models.config_fields import ConfigFields
from engine.models.rope_fields import read_rope

HAS_HEAD = "has_output_head"
"""A key that the formats add to the config, where their tensors say so."""

_MAX_LAYERS = 1024


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """Sizes in elements, lengths in tokens; `dtype` is the checkpoint's own ("bfloat16"), "" when it names none.

    `architecture` is the model type ("llama").  `qkv_bias`, `output_bias` (of attention) and
    `mlp_bias` say which projections have a bias; `qk_norm` puts an RMS norm on each head of
    query and key before rotation.  Without `has_head` the checkpoint has none that continues a text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    has_head: bool
    dtype: str
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    @abstractmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json's keys.  Raises `UnsupportedModel` or `BrokenCheckpoint`."""

    @classmethod
    def _read(
        cls,
        config: Mapping[str, Any],
        *,
        qkv_bias: bool,
        output_bias: bool,
        mlp_bias: bool,
        qk_norm: bool,
        default_head_dim: int | None = None,
    ) -> Self:
        _refuse_unsupported(config)
        fields = ConfigFields(config)
        num_heads = fields.positive_int("num_attention_heads")
        num_kv_heads = fields.positive_int("num_key_value_heads", num_heads)
        num_layers = fields.positive_int("num_hidden_layers")
        if num_heads % num_kv_heads or num_layers > _MAX_LAYERS:
            raise BrokenCheckpoint(
                f"The model's config has {num_heads} heads, {num_kv_heads} key heads and {num_layers} layers, which "
                "do not fit together; pull the model again or choose another."
            )
        hidden_size = fields.positive_int("hidden_size")
        head_dim = fields.positive_int("head_dim", default_head_dim or hidden_size // num_heads)
        max_position_embeddings = fields.positive_int("max_position_embeddings", 2048)
        return cls(
            architecture=fields.text("model_type", ""),
            vocab_size=fields.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive_int("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
            rope=read_rope(config, head_dim=head_dim, max_position_embeddings=max_position_embeddings),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            has_head=fields.flag(HAS_HEAD, not HEADLESS_DECODERS.intersection(fields.texts("architectures"))),
            dtype=fields.text("dtype", fields.text("torch_dtype", "")),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
        )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    fields = ConfigFields(config)
    has_window = fields.flag("use_sliding_window", False) or bool(set(fields.texts("layer_types")) - {"full_attention"})
    for reason in (
        unsupported_activation(fields.text("hidden_act", "silu"), fields.get("model_type")),
        unsupported_quantization(is_quantized=bool(fields.section("quantization_config"))),
        unsupported_window(has_sliding_window=has_window),
    ):
        if reason:
            raise UnsupportedModel(reason)
