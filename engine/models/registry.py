"""Model type -> model class.  The file of a model is named after its `model_type`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from engine.api.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from engine.models.config_fields import ConfigFields
from engine.models.decoder import DecoderModel

MODEL_TYPES = ("llama", "qwen2", "qwen3")


def model_class(config: Mapping[str, Any]) -> type[DecoderModel]:
    """The class for a checkpoint's config dict.  Raises `UnsupportedModel`, which names what is supported."""
    model_type = config.get("model_type")
    architectures = ConfigFields(config).texts("architectures")
    generates = not architectures or any(name.endswith("ForCausalLM") for name in architectures)
    if model_type not in MODEL_TYPES or not generates:
        named = architectures[0] if architectures else model_type
        raise UnsupportedModel(
            f"The architecture {named!r} is not supported; choose a text generation model of type "
            f"{', '.join(MODEL_TYPES[:-1])} or {MODEL_TYPES[-1]}."
        )
    found: type[DecoderModel] = importlib.import_module(f"engine.models.{model_type}").Model
    return found


def model_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The typed config of a checkpoint, without building the model.  Raises as `from_hf` does."""
    return model_class(config).config_class.from_hf(config)
