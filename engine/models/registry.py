"""Model type -> model class.  The file of a model is named after its `model_type`.

Which types there are is in `engine.api.architectures`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from engine.api.architectures import unsupported_architecture
from engine.api.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from engine.models.config_fields import ConfigFields
from engine.models.decoder import DecoderModel


def model_class(config: Mapping[str, Any]) -> type[DecoderModel]:
    """The class for a checkpoint's config dict.  Raises `UnsupportedModel`, which names what is supported."""
    model_type = config.get("model_type")
    if reason := unsupported_architecture(model_type, ConfigFields(config).texts("architectures")):
        raise UnsupportedModel(reason)
    found: type[DecoderModel] = importlib.import_module(f"engine.models.{model_type}").Model
    return found


def model_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The typed config of a checkpoint, without building the model.  Raises as `from_hf` does."""
    return model_class(config).config_class.from_hf(config)
