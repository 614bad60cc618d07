"""`LoadableModel`: what every model has for the loader, whatever it computes.

A model collects the weight slots of its layers under the checkpoint's names, and knows which are still empty.
Subclassed by `engine.models.decoder` and `engine.models.encoder`; filled by `engine.loading.loader`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator

import torch

from engine.api.errors import BrokenCheckpoint
from engine.layers.packed_linear import PackedLayer
from engine.layers.packed_weight import CodedRows
from engine.layers.weight_slot import WeightSlot
from engine.loading.mapped_file import MappedFile


class LoadableModel(torch.nn.Module):
    """A model whose weights are uninitialised until loaded; a subclass calls `expect_weights` when it is built.

    `weight_maps` are the files that loaded weights lie in, mapped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight_maps: list[MappedFile] = []
        self._missing: dict[str, WeightSlot] = {}

    @abstractmethod
    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Every checkpoint tensor the model needs, by its Hugging Face name."""

    @abstractmethod
    def ignores_weight(self, name: str) -> bool:
        """Whether a tensor is one that some checkpoints carry although the model has no use for it."""

    @property
    def weight_bytes(self) -> int:
        """What parameters, buffers and packed matrices take, once loaded."""
        plain = sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))
        return plain + sum(layer.weight.nbytes for _, layer in self.packed_layers())

    @property
    def num_parameters(self) -> int:
        """How many numbers the weights are."""
        return sum(parameter.numel() for parameter in self.parameters()) + sum(
            math.prod(layer.shape) for _, layer in self.packed_layers()
        )

    def packed_layers(self) -> Iterator[tuple[str, PackedLayer]]:
        """Every layer with a packed matrix, by its name; none unless the model is packed."""
        for name, module in self.named_modules():
            if isinstance(module, PackedLayer):
                yield name, module

    def expect_weights(self) -> None:
        """Note that every slot is empty."""
        self._missing = dict(self.weight_slots())

    def load_weight(self, name: str, tensor: torch.Tensor | CodedRows) -> None:
        """Take one checkpoint tensor over, as its slot needs it.

        Raises `BrokenCheckpoint` when it has no place or the wrong shape.
        """
        slot = self._missing.get(name)
        if slot is None:
            if self.ignores_weight(name):
                return
            raise BrokenCheckpoint(f"The model has no place for the tensor {name!r}; pull the model again.")
        if slot.shape != tuple(tensor.shape):
            raise BrokenCheckpoint(
                f"The tensor {name!r} has shape {tuple(tensor.shape)} but the model's config asks for {slot.shape}; "
                "pull the model again."
            )
        slot.load(tensor)
        del self._missing[name]

    def mark_loaded(self) -> None:
        """Note that all weights are in place, by another way than `load_weight`."""
        self._missing.clear()

    def missing_weights(self) -> list[str]:
        """Names of tensors not loaded yet, in model order."""
        return list(self._missing)
