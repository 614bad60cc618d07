"""Build a model and stream a checkpoint into it.

The loader knows no tensor by name: the model says what it needs and what may be left over,
and loading ends only when nothing is missing.  Called by `engine.build`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import torch

from engine.api.errors import BrokenCheckpoint
from engine.loading.checkpoint import Checkpoint
from engine.loading.dummy_checkpoint import DummyCheckpoint
from engine.loading.read_plan import StoredTensor
from engine.loading.staging import Staging, staging_for
from engine.loading.weight_stream import stream_tensors
from engine.models.decoder import DecoderModel
from engine.models.registry import model_class

_NUM_NAMED = 5
_PROGRESS_INTERVAL_S = 0.05


def load_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None],
    staging: Staging | None = None,
) -> DecoderModel:
    """A model on `device` with all weights in `dtype`.

    Weights stored as plain numbers are streamed through `staging` (by default: to GPUs only); all others
    come one at a time from the memory map.  `on_progress` gets how much is loaded and the total, in bytes
    where weights are streamed, else in tensors.  Raises `UnsupportedModel`, or `BrokenCheckpoint` before
    reading any weight when tensors are missing or left over.
    """
    found = model_class(checkpoint.config)
    model = found(found.config_class.from_hf(checkpoint.config), device=device, dtype=dtype)
    with torch.no_grad():
        if isinstance(checkpoint, DummyCheckpoint):
            checkpoint.fill(model)
        else:
            _require_match(model, checkpoint.tensor_names())
            staging, stored = staging or staging_for(device), checkpoint.stored_tensors()
            if staging is None or stored is None:
                _load_from_map(model, checkpoint, on_progress)
            else:
                _load_through(staging, model, stored, on_progress)
            _refuse("lacks", "the model needs", model.missing_weights())
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


def _load_from_map(model: DecoderModel, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> None:
    total = len(checkpoint.tensor_names())
    on_progress(0, total)
    for done, (name, tensor) in enumerate(checkpoint.tensors(), start=1):
        model.load_weight(name, tensor)
        on_progress(done, total)


def _load_through(
    staging: Staging, model: DecoderModel, stored: list[StoredTensor], on_progress: Callable[[int, int], None]
) -> None:
    slots = dict(model.weight_slots())
    wanted = [tensor for tensor in stored if tensor.name in slots]

    def landing(tensor: StoredTensor) -> torch.Tensor | None:
        slot = slots[tensor.name]
        return slot.landing(tensor.dtype) if slot.shape == tensor.shape else None

    report = _now_and_then(on_progress, sum(tensor.num_bytes for tensor in wanted))
    report(0)
    with staging, closing(stream_tensors(wanted, staging, landing=landing, on_bytes=report)) as tensors:
        for tensor, values in tensors:
            model.load_weight(tensor.name, values)


def _now_and_then(on_progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """Pass progress on at most every `_PROGRESS_INTERVAL_S`, and when it is complete."""
    next_report = 0.0

    def report(done: int) -> None:
        nonlocal next_report
        now = time.monotonic()
        if now >= next_report or done == total:
            next_report = now + _PROGRESS_INTERVAL_S
            on_progress(done, total)

    return report
