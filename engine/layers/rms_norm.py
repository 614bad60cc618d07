"""Root-mean-square normalisation (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import rms_norm

from engine.layers.weight_slot import CopySlot, WeightSlot, empty_parameter


class RmsNorm(torch.nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; the mean is taken in float32."""

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._shape = (size,)
        self._eps = eps
        self.weight = empty_parameter(size, device=device, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self._shape, self.weight, self._eps)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield "weight", CopySlot(self.weight)
