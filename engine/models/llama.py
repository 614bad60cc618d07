"""Llama 1 to 3.x, and the many models that share its layout (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.models.config import DecoderConfig
from engine.models.config_fields import ConfigFields
from engine.models.decoder import DecoderModel


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """`attention_bias` covers all four projections of attention."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        fields = ConfigFields(config)
        attention_bias = fields.flag("attention_bias", False)
        return cls._read(
            config,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", False),
            qk_norm=False,
        )


class Model(DecoderModel):
    config_class = ModelConfig
