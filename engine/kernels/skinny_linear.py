"""Matrix products of at most 16 rows, with the step before them folded in: launch and tuning.

At so few rows a product costs what reading its weights costs, and on small models the gaps
between kernels cost more; so the norm or the activation in front is recomputed by every program
instead of being a kernel.  One row runs `skinny_vector`, more run `skinny_rows`.  Which sizes a
program takes is fixed by `choose_tuning`, from benchmarks/kernels/linear_ops.py.  Called by
`TritonOps`, which also decides when cuBLAS is the better choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from engine.kernels.launch import num_multiprocessors, pdl_options, supports_pdl
from engine.kernels.skinny_rows import skinny_rows_kernel
from engine.kernels.skinny_vector import GATED, NORM, PLAIN, skinny_vector_kernel

MAX_ROWS = 16
_ALIGNMENT = 8  # elements: rows of 16-bit weights begin on 16 bytes
_REGISTERS_PER_SM = 65536
_MAX_K = 32768  # beyond this one row's input no longer fits a program's registers


@dataclass(frozen=True)
class SkinnyTuning:
    """What one program takes.

    `block_n` weight rows (for several input rows: 8, 16 or 32) with `num_warps` warps.  An SM is to hold
    `programs_per_sm` programs, which share out its registers: with fewer registers the assembler delays
    loads to their use.  One input row: when there are more tiles than fit at once, each program takes
    several.  Several input rows: `steps` times 32 elements of K per warp are in flight at once.
    """

    block_n: int
    num_warps: int
    programs_per_sm: int
    steps: int = 4

    @property
    def num_registers(self) -> int:
        """Per thread."""
        return min(_REGISTERS_PER_SM // (self.programs_per_sm * self.num_warps * 32) // 8 * 8, 255)


def supports(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `hidden` [T, ...] and `weight` [N, K] are in the reach of these kernels."""
    rows, size = hidden.shape[0], weight.shape[1]
    if rows > MAX_ROWS or size % _ALIGNMENT or size > _MAX_K:
        return False
    return rows == 1 or hidden.dtype != torch.float32


@cache
def choose_tuning(num_rows: int, n: int, k: int, num_sms: int) -> SkinnyTuning:
    """The sizes for M = num_rows, weight [n, k], on a device of `num_sms` multiprocessors."""
    return _tune_vector(n, k, num_sms) if num_rows == 1 else _tune_rows(num_rows, n, k, num_sms)


def _tune_vector(n: int, k: int, num_sms: int) -> SkinnyTuning:
    if k > 8192:  # the prologue's work is per program: one large program per SM
        return SkinnyTuning(block_n=2 if k <= 16384 else 1, num_warps=16, programs_per_sm=1)
    num_warps = 4 if k <= 1024 or (k <= 4096 and k % 2048) else 8
    # Up to 32 KB of weights per program keep memory busy; two programs per SM and more share it evenly.
    block_n = 8
    while block_n > 1 and (block_n * k > 16 * 1024 or -(-n // block_n) < 2 * num_sms - num_sms // 8):
        block_n //= 2
    num_tiles = -(-n // block_n)
    tiles_per_sm = -(-num_tiles // num_sms)
    # All tiles at once where registers allow; a loop over tiles holds two of them at times and needs more registers.
    looped, most = (5, 6) if num_warps == 4 else (2, 3)
    return SkinnyTuning(block_n, num_warps, max(looped, tiles_per_sm) if tiles_per_sm <= most else looped)


def _tune_rows(num_rows: int, n: int, k: int, num_sms: int) -> SkinnyTuning:
    block_n = 32 if num_rows > 8 else 16
    while block_n > 8 and -(-n // block_n) < num_sms - num_sms // 8:
        block_n //= 2
    steps = min(-(-k // 256), 64 // block_n if num_rows > 8 else 4)
    return SkinnyTuning(block_n, num_warps=8, programs_per_sm=2, steps=steps)


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tuning: SkinnyTuning | None = None
) -> torch.Tensor:
    """x [T, K], weight [N, K] -> x · weightᵀ + bias [T, N] for T <= 16; see `supports`."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(PLAIN.value, x, None, None, 0.0, weight, bias, out, None, tuning)
    return out


def norm_skinny_linear(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tuning: SkinnyTuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ops.norm_linear` for T <= 16 rows [T, K]: the output [T, N] and hidden + residual [T, K].

    Several rows need bfloat16's range (or fp32's): there the norm's scale is applied after the product.
    """
    out = torch.empty((hidden.shape[0], weight.shape[0]), dtype=hidden.dtype, device=hidden.device)
    total = hidden if residual is None else torch.empty_like(hidden)
    _launch(NORM.value, hidden, residual, norm_weight, eps, weight, bias, out, total, tuning)
    return out, total


def gated_skinny_linear(
    gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tuning: SkinnyTuning | None = None
) -> torch.Tensor:
    """gate_up [T, 2 I], weight [N, I] -> linear(silu(gate) · up) [T, N] for T <= 16."""
    out = torch.empty((gate_up.shape[0], weight.shape[0]), dtype=gate_up.dtype, device=gate_up.device)
    _launch(GATED.value, gate_up, None, None, 0.0, weight, bias, out, None, tuning)
    return out


def _launch(
    prologue: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor | None,
    tuning: SkinnyTuning | None,
) -> None:
    num_rows, device = x.shape[0], x.device
    n, k = weight.shape
    num_sms = num_multiprocessors(device)
    chosen = tuning or choose_tuning(num_rows, n, k, num_sms)
    num_tiles = -(-n // chosen.block_n)
    if num_rows > 1:
        skinny_rows_kernel[(num_tiles,)](
            x, residual, norm_weight, weight, bias, out, total, num_rows, n, eps,
            K=k, PROLOGUE=prologue, BLOCK_N=chosen.block_n, WARPS=chosen.num_warps, STEPS=chosen.steps,
            OVER_8=num_rows > 8, PDL=supports_pdl(device), num_warps=chosen.num_warps, num_stages=1,
            maxnreg=chosen.num_registers, **pdl_options(device),
        )  # fmt: skip
        return
    tiles_per_program = -(-num_tiles // (num_sms * chosen.programs_per_sm))
    skinny_vector_kernel[(-(-num_tiles // tiles_per_program),)](
        x, residual, norm_weight, weight, bias, out, total, n, eps, tiles_per_program,
        K=k, PROLOGUE=prologue, BLOCK_N=chosen.block_n, BLOCK_K=256 * chosen.num_warps, LOOP=tiles_per_program > 1,
        RAGGED=n % chosen.block_n != 0, PDL=supports_pdl(device), num_warps=chosen.num_warps,
        maxnreg=chosen.num_registers, **pdl_options(device),
    )  # fmt: skip
