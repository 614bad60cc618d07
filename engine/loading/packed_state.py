"""A quantised model's weights as named tensors, and back: what the cache of packed models keeps.

Each packed layer gives the `data` of its segments, whose shapes say all about them once the layer's shape is
known; norms and biases are as they are.  Knows no files; used by `engine.loading.packed_cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine.layers.packed_floats import TILE_OUTPUTS
from engine.layers.packed_linear import PackedLayer
from engine.layers.packed_weight import CODINGS, Coding, PackedMatrix, PackedWeight, packed_shape
from engine.models.loadable import LoadableModel

Shape = tuple[int, ...]

_SEGMENTS = ".segments."


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """A segment of a layer's weight, and the name of its data."""

    name: str
    coding: Coding
    out_features: int
    in_features: int


def named_tensors(model: LoadableModel) -> dict[str, torch.Tensor]:
    """All weights of a loaded packed model: data of segments, uint8, first, then plain parameters."""
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in model.packed_layers():
        for index, segment in enumerate(layer.weight.segments):
            tensors[_segment_name(name, index)] = segment.data
    return tensors | {name: parameter.detach() for name, parameter in model.named_parameters()}


def find_segments(model: LoadableModel, shapes: Mapping[str, Shape]) -> dict[str, list[SegmentPlace]] | None:
    """The segments of each packed layer by the shapes of named tensors; None if these are not just this model's."""
    known = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found: dict[str, list[SegmentPlace]] = {}
    for name, layer in model.packed_layers():
        segments = _segments_of(name, layer, shapes)
        if segments is None:
            return None
        found[name] = segments
        known |= {segment.name: shapes[segment.name] for segment in segments}
    return found if known == dict(shapes) else None


def restore(
    model: LoadableModel, segments: Mapping[str, list[SegmentPlace]], tensor: Callable[[str], torch.Tensor]
) -> None:
    """Fill an empty packed model; the data of packed matrices is taken as `tensor` gives it, all else is copied."""
    for name, layer in model.packed_layers():
        layer.put(
            PackedWeight(
                tuple(
                    PackedMatrix(place.coding, place.out_features, place.in_features, tensor(place.name))
                    for place in segments[name]
                )
            )
        )
    for name, parameter in model.named_parameters():
        parameter.copy_(tensor(name))
    model.mark_loaded()


def is_segment(name: str) -> bool:
    """Whether a named tensor is the data of a segment."""
    return _SEGMENTS in name


def _segment_name(layer: str, index: int) -> str:
    return f"{layer}{_SEGMENTS}{index}"


def _segments_of(name: str, layer: PackedLayer, shapes: Mapping[str, Shape]) -> list[SegmentPlace] | None:
    """All segments but the last consist of whole tiles."""
    out_features, in_features = layer.shape
    places: list[SegmentPlace] = []
    rest = out_features
    while rest > 0:
        shape = shapes.get(_segment_name(name, len(places)), ())
        coding = next((coding for coding in CODINGS if shape[2:] == (coding.record_bytes,)), None)
        if coding is None:
            return None
        size = min(rest, shape[0] * TILE_OUTPUTS)
        if size < 1 or shape != packed_shape(coding, size, in_features):
            return None
        places.append(SegmentPlace(_segment_name(name, len(places)), coding, size, in_features))
        rest -= size
    return places
