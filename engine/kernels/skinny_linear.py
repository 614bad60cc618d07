"""Matrix products of at most four rows, with the step before them folded in: launch and tuning.

At so few rows a product costs what reading its weights costs, and on small models the gaps
between kernels cost more; so the norm or the activation in front is recomputed by every program
instead of being a kernel.  Which sizes a program takes is fixed by `choose_tuning`, from
benchmarks/kernels/linear_ops.py.  Called by `TritonOps`, which also decides when another way is
better.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from engine.kernels.launch import num_multiprocessors, pdl_options, supports_pdl
from engine.kernels.skinny_vector import GATED, NORM, PLAIN, skinny_vector_kernel

MAX_ROWS = 4
_ALIGNMENT = 8  # elements: rows of 16-bit weights begin on 16 bytes
_REGISTERS_PER_SM = 65536
_MAX_WARPS = 16
_MAX_INPUT = 64  # elements of the input that a thread of `skinny_vector` holds


@dataclass(frozen=True)
class SkinnyTuning:
    """What one program takes.

    `block_n` weight rows with `num_warps` warps.  An SM is to hold `programs_per_sm` programs, which share out its
    registers: with fewer registers the assembler delays loads to their use.  When there are more tiles than fit at
    once, each program takes several.
    """

    block_n: int
    num_warps: int
    programs_per_sm: int

    @property
    def num_registers(self) -> int:
        """Per thread."""
        return min(_REGISTERS_PER_SM // (self.programs_per_sm * self.num_warps * 32) // 8 * 8, 255)


def supports(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `hidden` [T, ...] and `weight` [N, K] are in the reach of these kernels."""
    rows, size = hidden.shape[0], weight.shape[1]
    if rows > MAX_ROWS or size % _ALIGNMENT:
        return False
    return _padded_rows(rows) * _vectors_per_thread(size, _MAX_WARPS) * 8 <= _MAX_INPUT


def _padded_rows(num_rows: int) -> int:
    """The number of rows that `skinny_vector` is compiled for: 1, 2 or 4."""
    return 1 << (num_rows - 1).bit_length()


def _vectors_per_thread(k: int, num_warps: int) -> int:
    """How many times 8 elements of a row of K fall to one thread."""
    return -(-k // (256 * num_warps))


@cache
def choose_tuning(num_rows: int, n: int, k: int, num_sms: int) -> SkinnyTuning:
    """The sizes for M = num_rows, weight [n, k], on a device of `num_sms` multiprocessors.

    All tiles at once if registers allow, else small tiles in a loop, of which two at a time are held.
    """
    num_rows = _padded_rows(num_rows)
    if k > 8192:  # the prologue's work is per program: one large program per SM
        return SkinnyTuning(block_n=2 if k * num_rows <= 16384 else 1, num_warps=16, programs_per_sm=1)
    num_warps = 4 if k <= 2048 or (k <= 4096 and k % 2048) else 8
    while num_rows * _vectors_per_thread(k, num_warps) * 8 > _MAX_INPUT:
        num_warps *= 2
    vectors = _vectors_per_thread(k, num_warps)

    def resident(block_n: int, tiles: int) -> int:
        """Programs that an SM has registers for: packed weights, input and sums in fp32, addresses."""
        registers = 4 * block_n * vectors * tiles + 8 * num_rows * vectors + num_rows * block_n + 16
        return max(_REGISTERS_PER_SM // (registers * num_warps * 32), 1)

    # Up to 32 KB of weights per program keep memory busy, and every SM should have a program.
    block_n = 8 if num_rows < 4 else 4
    while block_n > 1 and (block_n * k > 16 * 1024 or -(-n // block_n) < num_sms - num_sms // 8):
        block_n //= 2
    tiles_per_sm = -(-n // (block_n * num_sms))
    if tiles_per_sm <= resident(block_n, 1):
        return SkinnyTuning(block_n, num_warps, max(tiles_per_sm, 16 // num_warps))
    while block_n > 1 and block_n * vectors > 4:
        block_n //= 2
    return SkinnyTuning(block_n, num_warps, resident(block_n, 2))


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tuning: SkinnyTuning | None = None
) -> torch.Tensor:
    """x [T, K], weight [N, K] -> x · weightᵀ + bias [T, N] for T <= 4; see `supports`."""
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
    """`Ops.norm_linear` for T <= 4 rows [T, K]: the output [T, N] and hidden + residual [T, K]."""
    out = torch.empty((hidden.shape[0], weight.shape[0]), dtype=hidden.dtype, device=hidden.device)
    total = hidden if residual is None else torch.empty_like(hidden)
    _launch(NORM.value, hidden, residual, norm_weight, eps, weight, bias, out, total, tuning)
    return out, total


def gated_skinny_linear(
    gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tuning: SkinnyTuning | None = None
) -> torch.Tensor:
    """gate_up [T, 2 I], weight [N, I] -> linear(silu(gate) · up) [T, N] for T <= 4."""
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
    tiles_per_program = -(-num_tiles // (num_sms * chosen.programs_per_sm))
    skinny_vector_kernel[(-(-num_tiles // tiles_per_program),)](
        x, residual, norm_weight, weight, bias, out, total, num_rows, n, eps, tiles_per_program,
        K=k, PROLOGUE=prologue, ROWS=_padded_rows(num_rows), BLOCK_N=chosen.block_n, BLOCK_K=256 * chosen.num_warps,
        LOOP=tiles_per_program > 1, RAGGED=n % chosen.block_n != 0, PDL=supports_pdl(device),
        num_warps=chosen.num_warps, maxnreg=chosen.num_registers, **pdl_options(device),
    )  # fmt: skip
