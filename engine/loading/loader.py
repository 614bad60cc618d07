"""Build a model and stream a checkpoint into it.

The loader knows no tensor by name: the model says what it needs and what may be left over,
and loading ends only when nothing is missing.  Called by the engine loop.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.api.errors import BrokenCheckpoint
from engine.loading.checkpoint import Checkpoint
from engine.loading.dummy_checkpoint import DummyCheckpoint
from engine.models.decoder import DecoderModel
from engine.models.registry import model_class

_NUM_NAMED = 5


def load_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None],
) -> DecoderModel:
    """A model on `device` with all weights in `dtype`.

    `on_progress` gets the tensors loaded so far and their total.  Raises `UnsupportedModel`, or
    `BrokenCheckpoint` before reading any weight when tensors are missing or left over.
    """
    found = model_class(checkpoint.config)
    model = found(found.config_class.from_hf(checkpoint.config), device=device, dtype=dtype)
    with torch.no_grad():
        if isinstance(checkpoint, DummyCheckpoint):
            checkpoint.fill(model)
        else:
            _require_match(model, checkpoint.tensor_names())
            _stream(model, checkpoint, on_progress)
    return model.eval()


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """What the model's weights will take in `dtype`, before any is read; errors as `load_model`."""
    found = model_class(checkpoint.config)
    model = found(found.config_class.from_hf(checkpoint.config), device=torch.device("meta"), dtype=dtype)
    return sum(parameter.nbytes for parameter in model.parameters())


def _require_match(model: DecoderModel, names: list[str]) -> None:
    needed, found = model.missing_weights(), set(names)
    _refuse("lacks", "the model needs", [name for name in needed if name not in found])
    left_over = sorted(name for name in found.difference(needed) if not model.ignores_weight(name))
    _refuse("has", "the model has no place for", left_over)


def _refuse(verb: str, relation: str, names: list[str]) -> None:
    if names:
        listed = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
        raise BrokenCheckpoint(
            f"The checkpoint {verb} {len(names)} tensors that {relation} ({listed}); pull the model again."
        )


def _stream(model: DecoderModel, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> None:
    total = len(checkpoint.tensor_names())
    on_progress(0, total)
    for done, (name, tensor) in enumerate(checkpoint.tensors(), start=1):
        model.load_weight(name, tensor)
        on_progress(done, total)
    _refuse("lacks", "the model needs", model.missing_weights())
