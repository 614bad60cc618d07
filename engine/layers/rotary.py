"""Rotary position embedding: `RopeConfig`, its inverse frequencies, and the rotation itself.

Su et al. 2021 (https://arxiv.org/abs/2104.09864), in the half-split layout of Hugging Face
checkpoints.  Angles are computed in float32 from inverse frequencies in float32, as
transformers does, so that both give the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic", "factors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles; fields after `factor` concern the kind they are named with.

    `original_context` (llama3, yarn) is the length in tokens the model was first trained on.
    `frequency_factors` (factors) divides each of the head_dim / 2 frequencies, as GGUF files
    of Llama 3 store it.  `dynamic` equals `default` up to `max_position_embeddings`, which
    is the most an engine serves.
    """

    kind: RopeKind
    theta: float
    head_dim: int
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """Radians per position of each rotated pair: float32 [head_dim / 2], on the CPU."""
    # Not with torch, whose arithmetic takes 2 MiB of its library into memory where nothing else needs it.
    return torch.from_numpy(_frequencies(rope).astype(np.float32, copy=False))


def _frequencies(rope: RopeConfig) -> np.ndarray:
    exponents = np.arange(0, rope.head_dim, 2, dtype=np.float32) / np.float32(rope.head_dim)
    base = np.float32(1.0) / (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    if rope.kind == "linear":
        return base / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, base)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, base)
    if rope.kind == "factors":
        return base / np.array(rope.frequency_factors, dtype=np.float32)
    return base


def _llama3_frequencies(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Keep short wavelengths, stretch long ones by `factor`, and blend between (Llama 3.1 model card)."""
    wavelength = 2 * math.pi / base
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((rope.original_context / wavelength - rope.low_freq_factor) / span).clip(0.0, 1.0)
    blended: np.ndarray = (1 - keep) * base / rope.factor + keep * base
    return blended


def _yarn_frequencies(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """NTK-by-parts of YaRN (https://arxiv.org/abs/2309.00071, section 3.2)."""

    def dimension_of(num_rotations: float) -> float:
        """The (fractional) pair that turns `num_rotations` times within the original context."""
        turns = rope.original_context / (num_rotations * 2 * math.pi)
        return rope.head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    width = high - low or 0.001  # both ends on one pair: a step instead of a ramp
    pairs = np.arange(rope.head_dim // 2, dtype=np.float32)
    stretch = ((pairs - low) / width).clip(0.0, 1.0)
    blended: np.ndarray = base / rope.factor * stretch + base * (1 - stretch)
    return blended


def yarn_attention_factor(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """The temperature YaRN puts on attention, as a scale of cos and sin (paper, section 3.3)."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


class Rotation:
    """The rotation of one step's tokens, shared by all layers: `cos` and `sin` float32 [T, head_dim / 2]."""

    __slots__ = ("_full", "cos", "sin")

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.cos = cos
        self.sin = sin
        self._full: tuple[torch.Tensor, torch.Tensor] | None = None

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate heads [T, H, head_dim]; returns a new tensor.

        Swapping the halves and negating one is folded into a roll and the sign of sin: three
        operations, whatever the number of heads.
        """
        if self._full is None:
            cos = torch.cat((self.cos, self.cos), dim=1).to(heads.dtype)
            signed_sin = torch.cat((-self.sin, self.sin), dim=1).to(heads.dtype)
            self._full = cos.unsqueeze(1), signed_sin.unsqueeze(1)
        cos, signed_sin = self._full
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        return torch.addcmul(heads * cos, swapped, signed_sin)


def tables_with_torch(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [T], radians per position float32 [P] -> scale · cos and scale · sin, float32 [T, P]."""
    angles = positions.unsqueeze(1).float() * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


Tables = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""`engine.kernels.ops.Ops.rotation_tables`."""


class RotaryEmbedding(torch.nn.Module):
    """Turns positions into the rotation that all layers of one step share."""

    def __init__(self, rope: RopeConfig, *, device: torch.device, tables: Tables = tables_with_torch) -> None:
        super().__init__()
        self._tables = tables
        self._scale = rope.attention_factor
        self.inverse_frequencies = torch.nn.Buffer(inverse_frequencies(rope).to(device), persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Positions, integers [T], to their rotation."""
        return Rotation(*self._tables(positions, self.inverse_frequencies, self._scale))
