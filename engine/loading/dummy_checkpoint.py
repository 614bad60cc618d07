"""Load format "dummy": a real config with random weights, to try shapes and speed without a download."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from engine.layers.packed_weight import CodedRows, Coding
from engine.models.loadable import LoadableModel

_SEED = 0
_WEIGHT_DEVIATION = 0.02
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


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

    def codings(self) -> dict[str, Coding]:
        return {}

    def float_dtype(self, name: str) -> torch.dtype:
        return _DTYPES.get(str(self.config["dtype"]), torch.float32)

    def coded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors()

    def files(self) -> list[Path]:
        return []

    def fill(
        self, model: LoadableModel, prepare: Callable[[str, torch.Tensor], torch.Tensor | CodedRows] | None = None
    ) -> None:
        """Norms become one, all else seeded normal numbers; `prepare` makes of a float matrix what is packed."""
        generator = torch.Generator(device=next(model.parameters()).device).manual_seed(_SEED)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _WEIGHT_DEVIATION, generator=generator)
        for name, slot in model.weight_slots():
            if slot.is_packed:
                assert prepare is not None
                values = torch.empty(slot.shape, dtype=self.float_dtype(name), device="cpu")
                values.normal_(0.0, _WEIGHT_DEVIATION, generator=generator)
                slot.load(prepare(name, values))
