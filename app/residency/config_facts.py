"""`config_facts`: what is known of a model that will get random weights.

For load format "dummy", which needs no weight files and so cannot be described by them.  Put in
place of `store.facts.read_model_facts` by `app.server`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from store.errors import UnsupportedFormat
from store.facts import ModelFacts


class _Config(msgspec.Struct, frozen=True):
    model_type: str = "unknown"
    max_position_embeddings: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None


def config_facts(path: Path) -> ModelFacts:
    """Facts of a directory with config.json; 0 parameters, since only the worker knows their number.

    Raises `UnsupportedFormat`.
    """
    try:
        config = msgspec.json.decode((path / "config.json").read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError) as error:
        raise UnsupportedFormat(
            f"{path} holds no readable config.json, which random weights need; name a model directory."
        ) from error
    return ModelFacts(
        architecture=config.model_type,
        num_parameters=0,
        quantization="random",
        context_length=config.max_position_embeddings,
        embedding_length=config.hidden_size,
        num_layers=config.num_hidden_layers,
    )
