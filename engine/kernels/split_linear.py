"""The product of a few dozen rows with a small weight matrix: a Triton kernel, its launch and tuning.

Such a product is over before its weights have arrived, so a program asks the L2 cache for all of
its weights before it waits for the kernel that makes its input (see `engine.kernels.launch`); it
then reads both through shared memory into the matrix units, weights as the left operand, of which
these take 64 rows at a time whatever the number of inputs.  Where N gives too few programs for the
device, several share out K, and the last of them to finish adds up, in a fixed order, what the
others have left.  Called by `TritonOps`, which also decides when cuBLAS is the better choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from engine.kernels.launch import num_multiprocessors, pdl_options, supports_pdl

MAX_ROWS = 128
NUM_COUNTERS = 1024
_MAX_SPLITS = 8
_LINE = 64  # 16-bit elements of a cache line
_SHARED_MEMORY = 100 * 1024  # bytes: leaves room for the next kernel's program beside it


@dataclass(frozen=True)
class SplitTuning:
    """What one program takes: `block_n` weight rows, up to `block_m` inputs and the `splits`-th part of K.

    `num_stages` blocks of `block_k` elements of K are in shared memory at once.
    """

    block_n: int
    block_m: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int

    @property
    def shared_memory(self) -> int:
        """Bytes."""
        return 2 * (self.block_n + self.block_m) * self.block_k * self.num_stages


@triton.jit
def _prefetch(w_ptr, first_row, first_k, end_k, N, K: tl.constexpr, BLOCK_N: tl.constexpr, THREADS: tl.constexpr):
    """Ask the L2 cache for weights [first_row : first_row + BLOCK_N, first_k : end_k]; K in steps of 64."""
    parts: tl.constexpr = THREADS // BLOCK_N
    thread = tl.arange(0, THREADS)
    row = tl.minimum(first_row + thread // parts, N - 1)
    line = first_k + (thread % parts) * 64
    for _ in range((end_k - first_k + parts * 64 - 1) // (parts * 64)):
        address = w_ptr + row.to(tl.int64) * K + tl.minimum(line, end_k - 64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )
        line += parts * 64


@triton.jit(do_not_specialize=["M"])
def _split_linear_kernel(
    x_ptr,  # [M, K]
    w_ptr,  # [N, K]
    bias_ptr,  # [N] or None
    out_ptr,  # [M, N]
    partials_ptr,  # fp32 [tiles, SPLITS, BLOCK_M, BLOCK_N] if SPLITS > 1
    counters_ptr,  # int32 [tiles], zeros, if SPLITS > 1; left as zeros
    M,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of N, SPLITS, tiles of M)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(1)
    num_blocks: tl.constexpr = K // BLOCK_K
    first = split * num_blocks // SPLITS
    end = (split + 1) * num_blocks // SPLITS
    first_row = tl.program_id(0) * BLOCK_N
    if PDL:
        _prefetch(w_ptr, first_row, first * BLOCK_K, end * BLOCK_K, N, K, BLOCK_N, THREADS)
        tl.extra.cuda.gdc_wait()

    # Rows beyond the end repeat the last one, so that loads need no masks.
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = first_row + tl.arange(0, BLOCK_N)
    in_block = tl.arange(0, BLOCK_K)[None, :]
    x_rows = x_ptr + tl.minimum(row, M - 1)[:, None] * K + in_block
    w_rows = w_ptr + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K + in_block
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(first, end, num_stages=STAGES):
        w = tl.load(w_rows + block * BLOCK_K)
        x = tl.load(x_rows + block * BLOCK_K)
        sums = tl.dot(w, tl.trans(x), sums)
    result = tl.trans(sums)

    if SPLITS > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        in_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partials = partials_ptr + tile * (SPLITS * BLOCK_M * BLOCK_N) + in_tile
        tl.store(partials + split * (BLOCK_M * BLOCK_N), result)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for other in tl.static_range(SPLITS):
            # Past the first-level cache, where another program's results do not show.
            result += tl.load(partials + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    pointers = out_ptr + row[:, None] * N + column[None, :]
    tl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


def supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x [T, K] and `weight` [N, K] are in the reach of this kernel."""
    return x.shape[0] <= MAX_ROWS and weight.shape[1] % _LINE == 0 and x.dtype in (torch.bfloat16, torch.float16)


@cache
def choose_tuning(num_rows: int, n: int, k: int, num_sms: int) -> SplitTuning:
    """The sizes for M = num_rows, weight [n, k], on a device of `num_sms` multiprocessors."""
    block_n = 64
    block_m = min(max(triton.next_power_of_2(num_rows), 16), MAX_ROWS)
    block_k = 128 if k % 128 == 0 and block_m <= 64 else 64
    splits = 1
    # One program per SM, of two blocks or more.
    while splits < _MAX_SPLITS and -(-n // block_n) * splits * 2 <= num_sms and splits * 4 <= k // block_k:
        splits *= 2
    # A part of K that fits is asked for at once: one stage is always being multiplied.
    num_stages = min(_SHARED_MEMORY // (2 * (block_n + block_m) * block_k), 6, -(-k // (block_k * splits)) + 1)
    return SplitTuning(block_n, block_m, block_k, splits, num_warps=4, num_stages=num_stages)


def allocate_counters(device: torch.device) -> torch.Tensor:
    """What `split_linear` counts finished programs with; one for all calls of a stream."""
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


def split_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    tuning: SplitTuning | None = None,
) -> torch.Tensor:
    """x [T, K], weight [N, K] -> x · weightᵀ + bias [T, N]; see `supports`.

    `counters` int32, zeros and left as zeros: calls that share them must not run at the same time.
    """
    num_rows, device = x.shape[0], x.device
    n, k = weight.shape
    chosen = tuning or choose_tuning(num_rows, n, k, num_multiprocessors(device))
    grid = (-(-n // chosen.block_n), chosen.splits, -(-num_rows // chosen.block_m))
    assert k % chosen.block_k == 0
    partials = None
    if chosen.splits > 1:
        num_tiles = grid[0] * grid[2]
        assert num_tiles <= counters.numel()
        shape = (num_tiles, chosen.splits, chosen.block_m, chosen.block_n)
        partials = torch.empty(shape, dtype=torch.float32, device=device)
    out = torch.empty((num_rows, n), dtype=x.dtype, device=device)
    _split_linear_kernel[grid](
        x,
        weight,
        bias,
        out,
        partials,
        None if partials is None else counters,
        num_rows,
        n,
        K=k,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        SPLITS=chosen.splits,
        STAGES=chosen.num_stages,
        THREADS=32 * chosen.num_warps,
        PDL=supports_pdl(device),
        num_warps=chosen.num_warps,
        **pdl_options(device),
    )
    return out
