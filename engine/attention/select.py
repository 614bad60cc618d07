"""Chooses the attention backend for a model and device; backends are imported only when tried."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.api.errors import UnsupportedModel
from engine.attention.backend import AttentionBackend, AttentionSpec


def select_backend(spec: AttentionSpec, device: torch.device) -> AttentionBackend:
    """The first backend that supports `spec`; raises `UnsupportedModel` with every backend's reasons."""
    reasons: list[str] = []
    for backend in _backends(device):
        unsupported = backend.reasons_unsupported(spec, device)
        if not unsupported:
            return backend(spec, device)  # type: ignore[call-arg]
        reasons.extend(f"{backend.name}: {reason}" for reason in unsupported)
    raise UnsupportedModel("No attention backend serves this model. " + " ".join(reasons))


def _backends(device: torch.device) -> Iterator[type[AttentionBackend]]:
    if device.type == "cuda":
        from engine.attention.triton_paged import TritonPagedAttention

        yield TritonPagedAttention
    from engine.attention.torch_paged import TorchPagedAttention

    yield TorchPagedAttention
