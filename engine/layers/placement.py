"""`Placement`: where a model's weights live, as what, and which `Ops` compute with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.ops import Ops
from engine.layers.packed_weight import PackedWeight
from engine.layers.weight_slot import empty_parameter


@dataclass(frozen=True, slots=True)
class Placement:
    """Handed down from a model to its layers when they are built.

    With `packed_ops`, matrices are packed (`engine.layers.packed_linear`) and all else is in `dtype`.
    """

    device: torch.device
    dtype: torch.dtype
    ops: Ops[torch.Tensor]
    packed_ops: Ops[PackedWeight] | None = None

    def parameter(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialised parameter here, which never needs a gradient."""
        return empty_parameter(*shape, device=self.device, dtype=self.dtype)
