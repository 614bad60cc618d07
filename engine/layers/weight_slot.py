"""`WeightSlot`: where one checkpoint tensor goes.

A layer offers one slot per checkpoint tensor it needs; merged layers offer several slots
into one parameter.  A model collects the slots of its layers under the checkpoint's
names, and the loader fills them without knowing how a layer keeps its weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from engine.layers.packed_weight import CodedRows


class WeightSlot(Protocol):
    """One tensor's place in a layer; `shape` is the tensor's shape in the checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def is_packed(self) -> bool:
        """Whether the layer keeps a packed matrix, made of just what `load` gets."""
        ...

    def landing(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The slot's own memory, of `shape` and contiguous, if a tensor of `dtype` may be put there before `load`.

        None means that the slot has to see the tensor somewhere else first, for instance to convert it.
        """
        ...

    def load(self, values: torch.Tensor | CodedRows) -> None:
        """Take over `values`, of `shape`: coded rows, or any floating dtype from any device, even the `landing` itself.

        On a GPU the work goes to the current stream.  The caller may reuse a tensor's memory after that work, but not
        that of what a packed slot gets, all of whose layer's parts are of one kind: coded, or `FLOAT_DTYPES`.
        """
        ...


class CopySlot:
    """A slot that copies into a parameter, or into a view of one, converting dtype and device."""

    def __init__(self, destination: torch.Tensor) -> None:
        self._destination = destination.detach()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._destination.shape)

    @property
    def is_packed(self) -> bool:
        return False

    def landing(self, dtype: torch.dtype) -> torch.Tensor | None:
        fits = dtype == self._destination.dtype and self._destination.is_contiguous()
        return self._destination if fits else None

    def load(self, values: torch.Tensor | CodedRows) -> None:
        tensor = values.dequantize() if isinstance(values, CodedRows) else values
        is_there = tensor.device == self._destination.device and tensor.data_ptr() == self._destination.data_ptr()
        if not is_there:
            self._destination.copy_(tensor)


class SlottedLayer(Protocol):
    """A layer that can be filled from a checkpoint."""

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Checkpoint names, relative to the layer, with their slots."""
        ...


def slots_under(prefix: str, layer: SlottedLayer) -> Iterator[tuple[str, WeightSlot]]:
    """The slots of `layer` with `prefix` and a dot before their names."""
    for name, slot in layer.weight_slots():
        yield f"{prefix}.{name}", slot


def empty_parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.nn.Parameter:
    """An uninitialised parameter that never needs a gradient."""
    return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)
