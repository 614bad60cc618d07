"""Qwen3: the dense decoder with an RMS norm on each query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.models.config import DecoderConfig
from engine.models.config_fields import ConfigFields
from engine.models.decoder import DecoderModel

_DEFAULT_HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """Heads are 128 wide unless the config says otherwise, whatever the hidden size."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        attention_bias = ConfigFields(config).flag("attention_bias", False)
        return cls._read(
            config,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=False,
            qk_norm=True,
            default_head_dim=_DEFAULT_HEAD_DIM,
        )


class Model(DecoderModel):
    config_class = ModelConfig
