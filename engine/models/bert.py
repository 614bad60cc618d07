"""BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805), and the many embedders of its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.models.encoder import EncoderModel
from engine.models.encoder_config import EncoderConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig(EncoderConfig):
    """A cross-encoder's classifier comes after BERT's own pooler."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        return cls._read(config, first_position=0, head="pooler")


class Model(EncoderModel):
    config_class = ModelConfig
