"""Residual add and RMS norm in one pass over memory: a Triton kernel, one program per row.

`TritonOps` calls it where the norm is not folded into the projection behind it.  The torch
reference is `TorchOps.norm_linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import pdl_options, supports_pdl


@triton.jit
def _add_rms_norm_kernel(
    hidden_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.arange(0, BLOCK_K)
    inside = columns < K
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    start = tl.program_id(0).to(tl.int64) * K
    if PDL:
        tl.extra.cuda.gdc_wait()
    hidden = tl.load(hidden_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        total = (hidden + residual).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + start + columns, total, mask=inside)
        hidden = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(hidden * hidden) / K + eps)
    normed = hidden * inverse * weight
    tl.store(normed_ptr + start + columns, normed.to(normed_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden and residual [T, K], weight [K] -> x / sqrt(mean(x²) + eps) · weight and x = hidden + residual, [T, K].

    Without a residual x is `hidden` itself.  The sum is rounded to the dtype before it is normalised; sums of
    squares are fp32.
    """
    num_rows, size = hidden.shape
    normed = torch.empty_like(hidden)
    total = hidden if residual is None else torch.empty_like(hidden)
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(num_rows,)](
        hidden,
        residual,
        weight,
        normed,
        None if residual is None else total,
        eps,
        K=size,
        BLOCK_K=block,
        PDL=supports_pdl(hidden.device),
        # 8 to 16 elements a thread: two 16-byte loads in flight, and enough rows per SM to hide the reduction.
        num_warps=min(max(block // 512, 1), 16),
        **pdl_options(hidden.device),
    )
    return normed, total
