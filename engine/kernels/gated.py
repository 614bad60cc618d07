"""The gated activation silu(gate) · up in one pass over memory: a Triton kernel.

`TritonOps` calls it where the activation is not folded into the projection behind it.  The torch
reference is `TorchOps.gated_linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import pdl_options, supports_pdl

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, INTERMEDIATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INTERMEDIATE
    gate_start = gate_up_ptr + row * (2 * INTERMEDIATE)
    gate = tl.load(gate_start + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_start + INTERMEDIATE + columns, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * INTERMEDIATE + columns, product.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] -> silu(gate) · up [T, I]; computed in fp32 and rounded once."""
    num_rows, width = gate_up.shape
    intermediate = width // 2
    out = torch.empty((num_rows, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(num_rows, -(-intermediate // _BLOCK))](
        gate_up,
        out,
        INTERMEDIATE=intermediate,
        BLOCK=_BLOCK,
        PDL=supports_pdl(gate_up.device),
        num_warps=4,
        **pdl_options(gate_up.device),
    )
    return out
