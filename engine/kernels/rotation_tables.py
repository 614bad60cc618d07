"""Cosines and sines of a step's positions, in one launch; every layer of the step reads them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import pdl_options, supports_pdl


@triton.jit
def _rotation_tables_kernel(
    positions,
    inverse_frequencies,
    cos,
    sin,
    scale,
    NUM_PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.arange(0, PADDED)
    frequency = tl.load(inverse_frequencies + pair, mask=pair < NUM_PAIRS, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    place = token * NUM_PAIRS + pair
    tl.store(cos + place, tl.cos(angle) * scale, mask=pair < NUM_PAIRS)
    tl.store(sin + place, tl.sin(angle) * scale, mask=pair < NUM_PAIRS)


def rotation_tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions int32 [T], radians per position float32 [P] -> scale · cos and scale · sin, float32 [T, P]."""
    num_tokens, num_pairs = positions.shape[0], inverse_frequencies.shape[0]
    cos = torch.empty((num_tokens, num_pairs), dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    _rotation_tables_kernel[(num_tokens,)](
        positions,
        inverse_frequencies,
        cos,
        sin,
        scale,
        NUM_PAIRS=num_pairs,
        PADDED=triton.next_power_of_2(num_pairs),
        PDL=supports_pdl(positions.device),
        num_warps=2,
        **pdl_options(positions.device),
    )
    return cos, sin
