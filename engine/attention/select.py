"""Chooses the attention backend for a model and device; backends are imported only when tried."""

from __future__ import annotations

import torch

from engine.api.errors import UnsupportedModel
from engine.attention.backend import AttentionBackend, CacheSpec
from engine.attention.torch_paged import TorchPagedAttention

BACKENDS = (TorchPagedAttention,)


def select_backend(spec: CacheSpec, device: torch.device) -> AttentionBackend:
    """The first backend that supports `spec`; raises `UnsupportedModel` with every backend's reasons."""
    reasons: list[str] = []
    for backend in BACKENDS:
        unsupported = backend.reasons_unsupported(spec, device)
        if not unsupported:
            return backend(spec, device)
        reasons.extend(f"{backend.name}: {reason}" for reason in unsupported)
    raise UnsupportedModel("No attention backend serves this model. " + " ".join(reasons))
