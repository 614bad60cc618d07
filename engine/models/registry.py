"""Model type -> model class.  The file of a model is named after its `model_type`.

Which types there are is in `engine.api.architectures`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from engine.api.architectures import DECODER_TYPES, ENCODER_TYPES, unsupported_architecture
from engine.api.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from engine.models.config_fields import ConfigFields
from engine.models.decoder import DecoderModel
from engine.models.encoder import EncoderModel


def model_class(config: Mapping[str, Any]) -> type[DecoderModel]:
    """The decoder class for a checkpoint's config dict.  Raises `UnsupportedModel`, which names what is supported."""
    found: type[DecoderModel] = _model_class(config, DECODER_TYPES)
    return found


def encoder_class(config: Mapping[str, Any]) -> type[EncoderModel]:
    """The encoder class for a checkpoint's config dict; errors as `model_class`."""
    found: type[EncoderModel] = _model_class(config, ENCODER_TYPES)
    return found


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config dict is that of an encoder."""
    return config.get("model_type") in ENCODER_TYPES


def model_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The typed config of a decoder's checkpoint, without building the model.  Raises as `from_hf` does."""
    return model_class(config).config_class.from_hf(config)


def _model_class(config: Mapping[str, Any], types: tuple[str, ...]) -> Any:
    model_type, classes = config.get("model_type"), ConfigFields(config).texts("architectures")
    if reason := unsupported_architecture(model_type, classes, has_own_code=bool(config.get("auto_map"))):
        raise UnsupportedModel(reason)
    assert model_type in types, f"{model_type} is not one of {types}"
    return importlib.import_module(f"engine.models.{str(model_type).replace('-', '_')}").Model
