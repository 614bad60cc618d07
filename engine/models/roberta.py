"""RoBERTa (Liu et al. 2019, https://arxiv.org/abs/1907.11692): BERT with one type and other positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.models.config_fields import ConfigFields
from engine.models.encoder import EncoderModel
from engine.models.encoder_config import EncoderConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig(EncoderConfig):
    """Positions begin after the id of the padding token, which is the row that padding would have."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        return cls._read(config, first_position=ConfigFields(config).token_id("pad_token_id", 1) + 1, head="dense")


class Model(EncoderModel):
    config_class = ModelConfig
