"""`PackedLinear` and `PackedEmbedding`: the layers of `linear` and `embedding` with packed matrices.

A matrix is packed when the last of its parts has arrived; nothing of the parts is kept.  Or it is put in place
whole, from the cache of packed models.  Built by `engine.layers.select`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from engine.kernels.ops import Ops
from engine.layers.linear import Product
from engine.layers.packed_weight import CodedRows, PackedWeight
from engine.layers.placement import Placement
from engine.layers.rms_norm import RmsNorm
from engine.layers.weight_slot import CopySlot, WeightSlot


class PackedLayer(torch.nn.Module):
    """A packed weight of one input, made of `parts`: names and output features, in output order."""

    def __init__(self, in_features: int, parts: Mapping[str, int], placement: Placement) -> None:
        super().__init__()
        assert placement.packed_ops is not None
        self._ops: Ops[PackedWeight] = placement.packed_ops
        self._pack = placement.pack
        self._in_features = in_features
        self._parts = dict(parts)
        self._arrived: dict[str, CodedRows | torch.Tensor] = {}
        self._weight: PackedWeight | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input features."""
        return sum(self._parts.values()), self._in_features

    @property
    def weight(self) -> PackedWeight:
        """The weight, which must be complete."""
        assert self._weight is not None, "the layer is not loaded yet"
        return self._weight

    def put(self, weight: PackedWeight) -> None:
        """Take a whole weight of this layer's `shape` over."""
        assert (weight.out_features, weight.in_features) == self.shape
        self._weight = weight

    def take(self, part: str, rows: CodedRows | torch.Tensor) -> None:
        """Take one part over, as it shall be packed; the last one completes the weight."""
        self._arrived[part] = rows
        if len(self._arrived) == len(self._parts):
            self._weight = self._pack([self._arrived[name] for name in self._parts])
            self._arrived.clear()

    def part_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """One slot per part, by its name."""
        for name, size in self._parts.items():
            yield name, PackedSlot(self, name, (size, self._in_features))


class PackedSlot:
    """The place of one part; see `WeightSlot`."""

    def __init__(self, layer: PackedLayer, part: str, shape: tuple[int, int]) -> None:
        self._layer = layer
        self._part = part
        self.shape = shape
        self.is_packed = True

    def landing(self, dtype: torch.dtype) -> None:
        return None

    def load(self, values: torch.Tensor | CodedRows) -> None:
        self._layer.take(self._part, values)


class PackedLinear(Product, PackedLayer):
    """See `engine.layers.linear.Linear`."""

    def __init__(self, in_features: int, parts: Mapping[str, int], placement: Placement, *, bias: bool) -> None:
        super().__init__(in_features, parts, placement)
        self.bias = placement.parameter(sum(parts.values())) if bias else None

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        start = 0
        for name, slot in self.part_slots():
            prefix, size = f"{name}." if name else "", slot.shape[0]
            yield f"{prefix}weight", slot
            if self.bias is not None:
                yield f"{prefix}bias", CopySlot(self.bias.narrow(0, start, size))
            start += size


class PackedEmbedding(PackedLayer):
    """See `engine.layers.embedding.TokenEmbedding`."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__(hidden_size, {"weight": vocab_size}, placement)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [T] -> a fresh tensor [T, hidden_size]."""
        return self._ops.embed(token_ids, self.weight)

    def project(self, norm: RmsNorm, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [N, hidden_size] -> scores of its norm [N, vocab_size]."""
        return self._ops.norm_linear(hidden, None, norm.weight, norm.eps, self.weight, None)[0]

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        return self.part_slots()
