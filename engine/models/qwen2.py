"""Qwen2 and Qwen2.5: the dense decoder with a bias on query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.models.config import DecoderConfig
from engine.models.decoder import DecoderModel


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """The biases are part of the architecture; the config has no switch for them."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        return cls._read(config, qkv_bias=True, output_bias=False, mlp_bias=False, qk_norm=False)


class Model(DecoderModel):
    config_class = ModelConfig
