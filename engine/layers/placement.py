"""`Placement`: where a model's weights live, as what, and which `Ops` compute with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kernels.ops import Ops
from engine.layers.packed_weight import CodedRows, PackedWeight, pack
from engine.layers.weight_slot import empty_parameter


class ParameterMemory(Protocol):
    """Where parameters get their memory, if not from torch's allocator."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised, contiguous tensor.  Raises `InsufficientMemory`."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Handed down from a model to its layers when they are built.

    With `packed_ops`, matrices are packed (`engine.layers.packed_linear`) by `pack`, and all else is in `dtype`.
    Parameters are on `device`, in `memory` if there is one.
    """

    device: torch.device
    dtype: torch.dtype
    ops: Ops[torch.Tensor]
    packed_ops: Ops[PackedWeight] | None = None
    memory: ParameterMemory | None = None
    pack: Callable[[Sequence[CodedRows | torch.Tensor]], PackedWeight] = pack

    def parameter(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialised parameter here, which never needs a gradient."""
        if self.memory is None:
            return empty_parameter(*shape, device=self.device, dtype=self.dtype)
        return torch.nn.Parameter(self.memory.empty(shape, self.dtype), requires_grad=False)
