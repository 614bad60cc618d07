"""Load format "dummy": a real config with random weights, to try shapes and speed without a download."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_SEED = 0
_WEIGHT_DEVIATION = 0.02


class DummyCheckpoint:
    """A checkpoint without tensors; see `Checkpoint`.  The loader calls `fill` instead of streaming."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.config["dtype"] = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        self.num_bytes = 0

    def tensor_names(self) -> list[str]:
        return []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def stored_tensors(self) -> None:
        return None

    def fill(self, model: torch.nn.Module) -> None:
        """Fill every parameter where it lies: norms with one, the rest from a seeded normal distribution."""
        generator = torch.Generator(device=next(model.parameters()).device).manual_seed(_SEED)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _WEIGHT_DEVIATION, generator=generator)
