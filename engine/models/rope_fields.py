"""Read `RopeConfig` from a config dict, in the spelling of transformers 5 or of older checkpoints.

New: `rope_parameters` = {rope_type, rope_theta, ...}.  Old: `rope_theta` beside a
`rope_scaling` = {type or rope_type, factor, ...} that is null without scaling.  GGUF files
use the new spelling, with the rope type "factors" of our own for stored frequency factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.layers.rotary import RopeConfig, RopeKind, yarn_attention_factor
from engine.models.config_fields import ConfigFields

_DEFAULT_THETA = 10_000.0


def read_rope(config: Mapping[str, Any], *, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """The rotary embedding of a dense decoder.  Raises `UnsupportedModel` or `BrokenCheckpoint`."""
    top = ConfigFields(config)
    section = top.section("rope_parameters") or top.section("rope_scaling") or {}
    rope = ConfigFields(section, within="the rope settings of the model's config")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in get_args(RopeKind):
        raise UnsupportedModel(
            f"The rope type {kind!r} is not supported; choose a model with one of: {', '.join(get_args(RopeKind))}."
        )
    if rope.positive_float("partial_rotary_factor", top.positive_float("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("Rotating only part of each head is not supported; choose another model.")
    theta = rope.positive_float("rope_theta", top.positive_float("rope_theta", _DEFAULT_THETA))
    if theta <= 1.0 or head_dim % 2:
        raise BrokenCheckpoint(
            f"A rope theta of {theta} with heads of {head_dim} is not usable; pull the model again or choose another."
        )
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, head_dim=head_dim, factor=rope.positive_float("factor"))
    if kind == "llama3":
        return _read_llama3(rope, theta, head_dim, max_position_embeddings)
    if kind == "yarn":
        return _read_yarn(rope, theta, head_dim, max_position_embeddings)
    if kind == "factors":
        return _read_factors(section, theta, head_dim)
    return RopeConfig(kind="default" if kind == "default" else "dynamic", theta=theta, head_dim=head_dim)


def _read_llama3(rope: ConfigFields, theta: float, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if high <= low:
        raise BrokenCheckpoint(
            f"'high_freq_factor' ({high}) must be above 'low_freq_factor' ({low}); pull the model again."
        )
    return RopeConfig(
        kind="llama3",
        theta=theta,
        head_dim=head_dim,
        factor=rope.positive_float("factor"),
        original_context=rope.positive_int("original_max_position_embeddings", max_position_embeddings),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(rope: ConfigFields, theta: float, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    original_context = rope.positive_int("original_max_position_embeddings", max_position_embeddings)
    factor = rope.positive_float("factor", max_position_embeddings / original_context)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        default_attention_factor = yarn_attention_factor(
            factor, rope.positive_float("mscale"), rope.positive_float("mscale_all_dim")
        )
    else:
        default_attention_factor = yarn_attention_factor(factor)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        head_dim=head_dim,
        factor=factor,
        original_context=original_context,
        beta_fast=rope.positive_float("beta_fast", 32.0),
        beta_slow=rope.positive_float("beta_slow", 1.0),
        attention_factor=rope.positive_float("attention_factor", default_attention_factor),
        truncate=rope.flag("truncate", True),
    )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _read_factors(section: Mapping[str, Any], theta: float, head_dim: int) -> RopeConfig:
    factors = section.get("frequency_factors")
    if not isinstance(factors, list | tuple) or len(factors) != head_dim // 2 or not all(map(_is_positive, factors)):
        raise BrokenCheckpoint(
            f"The rope frequency factors are not {head_dim // 2} positive numbers; pull the model again."
        )
    return RopeConfig(kind="factors", theta=theta, head_dim=head_dim, frequency_factors=tuple(map(float, factors)))
