"""Float matrices -> 8-bit codes, symmetric in groups of 32 inputs.

A group's scale is its largest magnitude / 127, rounded to float16 before the codes are computed from it, so
that the rounding of scales costs nothing.  Used by the loader and for GGUF types whose groups are not of 32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.layers.packed_weight import GROUP_INPUTS, CodedRows, Coding, empty_rows

INT8 = Coding(8, is_symmetric=True)
"""What matrices are quantised to."""
_LARGEST_CODE = 127
_CHUNK_ELEMENTS = 1 << 17
_CPU = torch.device("cpu")


def quantize_rows(name: str, values: torch.Tensor) -> CodedRows:
    """The float matrix [N, K] of the tensor `name`, in 8 bits.  Temporaries are small, whatever its size.

    Raises `BrokenCheckpoint` for numbers that are none, `UnsupportedModel` for those too large for float16 scales.
    """
    coded = empty_rows(INT8, values.shape[0], values.shape[1], device=_CPU)
    for rows in row_chunks(*values.shape):
        quantize_into(name, values[rows].float(), coded, rows)
    return coded


def row_chunks(out_features: int, in_features: int) -> Iterator[slice]:
    """Slices that cover the rows, each of about as many numbers as stay in a processor's cache."""
    step = max(1, _CHUNK_ELEMENTS // in_features)
    for start in range(0, out_features, step):
        yield slice(start, min(start + step, out_features))


def quantize_into(name: str, values: torch.Tensor, coded: CodedRows, rows: slice) -> None:
    """Code float32 `values` [R, K] as the given rows of `coded`; errors as `quantize_rows`."""
    padded = pad(values, (0, -values.shape[1] % GROUP_INPUTS))
    groups = padded.unflatten(1, (-1, GROUP_INPUTS))
    largest = groups.abs().amax(dim=2)
    if not largest.isfinite().all():
        raise BrokenCheckpoint(f"The tensor {name!r} holds numbers that are not finite; pull the model again.")
    scales = _scales(largest)
    if not scales.isfinite().all():
        raise UnsupportedModel(
            f"The tensor {name!r} holds numbers too large to be quantised; load the model with --quantization none."
        )
    inverse = torch.where(scales > 0, 1.0 / scales.float(), 0.0)
    codes = (groups * inverse.unsqueeze(2)).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
    coded.codes[rows].copy_(codes.add_(INT8.zero))
    coded.scales[rows].copy_(scales)


def _scales(largest: torch.Tensor) -> torch.Tensor:
    """Scales, float16, of groups by their largest magnitudes, float32; the largest is at most 127.5 scales."""
    scales = (largest / _LARGEST_CODE).half()
    # Tiny scales are coarse in float16: one rounded down too far gives way to the next larger number.
    too_small = scales.float() * (_LARGEST_CODE + 0.5) < largest
    return torch.where(too_small, (scales.view(torch.int16) + 1).view(torch.float16), scales)
