"""The product of 2 to 16 rows with a weight matrix, bound by reading the weights: a Triton kernel.

A program owns BLOCK_N rows of the weight.  Its WARPS warps share out K: in a step each takes its
own 32 elements of K, multiplies on the matrix units into its own accumulator, and the accumulators
are added at the end, so no other barrier and no shared memory stands between memory and the
matrix units.  For that, weights and inputs are loaded as they lie (16 bytes a thread, 4 threads
a row, 8 rows a warp) and K is renamed inside each 32 so that these registers are the operands of
`mma.m16n8k16`; the sum over K does not depend on its order.  The first chunk of weights is asked
for before the kernel waits for its input (see `engine.kernels.launch`), every later one before
the current one is multiplied.  Launched by `engine.kernels.skinny_linear`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.skinny_vector import GATED, NORM, add_parts, gate_parts


@triton.jit
def _fragment(block, WARPS: tl.constexpr):
    """A loaded block [8, WARPS, 32] -> operand [WARPS, 8, 32], K renamed to the order of the registers."""
    by_thread = tl.permute(tl.reshape(block, (8, WARPS, 4, 2, 4)), (1, 0, 3, 2, 4))
    return tl.reshape(by_thread, (WARPS, 8, 32))


@triton.jit
def _stack(upper, lower, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """Two operands [WARPS, ROWS, 32] one above the other: [WARPS, 2 ROWS, 32], within each thread's registers."""
    return tl.reshape(tl.permute(tl.join(upper, lower), (0, 3, 1, 2)), (WARPS, 2 * ROWS, 32))


@triton.jit
def _load_weights(
    w_ptr,
    first_row,
    chunk,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """STEPS · BLOCK_N / 8 blocks [8, WARPS, 32], those of a step together; zeros beyond N and K."""
    rows = tl.arange(0, 8)[:, None, None]
    k_in_step = tl.arange(0, WARPS)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    base = w_ptr + first_row.to(tl.int64) * K
    blocks: tl.tuple = ()
    for step in tl.static_range(STEPS):
        k = (chunk * STEPS + step) * (WARPS * 32) + k_in_step
        for part in tl.static_range(BLOCK_N // 8):
            row = part * 8 + rows
            mask = (first_row + row < N) & (k < K)
            blocks += (tl.load(base + row * K + k, mask=mask, other=0.0, eviction_policy="evict_first"),)
    return blocks


@triton.jit
def _load_inputs(
    ptr,
    first_row: tl.constexpr,
    M,
    STRIDE: tl.constexpr,
    chunk,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Input rows first_row to first_row + 7 of a chunk: STEPS blocks [8, WARPS, 32], zeros beyond M and K."""
    row = first_row + tl.arange(0, 8)[:, None, None]
    k_in_step = tl.arange(0, WARPS)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    blocks: tl.tuple = ()
    for step in tl.static_range(STEPS):
        k = (chunk * STEPS + step) * (WARPS * 32) + k_in_step
        blocks += (tl.load(ptr + row * STRIDE + k, mask=(row < M) & (k < K), other=0.0),)
    return blocks


@triton.jit
def _store_inputs(
    ptr,
    blocks,
    first_row: tl.constexpr,
    M,
    chunk,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Program 0 writes what `_load_inputs` would read, stride K."""
    num_rows = tl.where(tl.program_id(0) == 0, M, 0)
    row = first_row + tl.arange(0, 8)[:, None, None]
    k_in_step = tl.arange(0, WARPS)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    for step in tl.static_range(STEPS):
        k = (chunk * STEPS + step) * (WARPS * 32) + k_in_step
        tl.store(ptr + row * K + k, blocks[step], mask=(row < num_rows) & (k < K))


@triton.jit
def _apply_gain(parts, norm_ptr, chunk, K: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr):
    """The norm's weight times a chunk.  The scale of each row follows after the product, which costs no accuracy."""
    # Read once for each of the 8 rows: so it comes in the layout of the chunk instead of through shared memory.
    k_in_step = (
        tl.arange(0, WARPS)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :] + tl.zeros((8, 1, 1), tl.int32)
    )
    products: tl.tuple = ()
    for step in tl.static_range(STEPS):
        k = (chunk * STEPS + step) * (WARPS * 32) + k_in_step
        gain = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        products += ((parts[step].to(tl.float32) * gain).to(parts[step].dtype),)
    return products


@triton.jit
def _inputs(
    x_ptr,
    residual_ptr,
    norm_ptr,
    total_ptr,
    squares,
    first_row: tl.constexpr,
    M,
    chunk,
    K: tl.constexpr,
    PROLOGUE: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Eight rows of a chunk after the prologue, and the sums of squares [8, WARPS, 32] when it is the norm."""
    stride: tl.constexpr = 2 * K if PROLOGUE == GATED else K
    x = _load_inputs(x_ptr, first_row, M, stride, chunk, K, WARPS, STEPS)
    if PROLOGUE == GATED:
        up = _load_inputs(x_ptr + K, first_row, M, stride, chunk, K, WARPS, STEPS)
        x = gate_parts(x, up, STEPS, x_ptr.dtype.element_ty)
    if PROLOGUE == NORM:
        if residual_ptr is not None:
            x = add_parts(x, _load_inputs(residual_ptr, first_row, M, stride, chunk, K, WARPS, STEPS), STEPS)
            _store_inputs(total_ptr, x, first_row, M, chunk, K, WARPS, STEPS)
        for step in tl.static_range(STEPS):
            squares += x[step].to(tl.float32) * x[step].to(tl.float32)
        x = _apply_gain(x, norm_ptr, chunk, K, WARPS, STEPS)
    return x, squares


@triton.jit
def _multiply(
    weights,
    upper,
    lower,
    sums,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
    OVER_8: tl.constexpr,
):
    """sums [WARPS, 16, BLOCK_N] += inputs · weightsᵀ over the chunk, each warp its own part of K."""
    parts: tl.constexpr = BLOCK_N // 8
    for step in tl.static_range(STEPS):
        x_upper = _fragment(upper[step], WARPS)
        x_lower = _fragment(lower[step], WARPS) if OVER_8 else tl.zeros_like(x_upper)
        x = _stack(x_upper, x_lower, WARPS, 8)
        w = _fragment(weights[step * parts], WARPS)
        if parts >= 2:
            w = _stack(w, _fragment(weights[step * parts + 1], WARPS), WARPS, 8)
        if parts == 4:
            w_2 = _fragment(weights[step * parts + 2], WARPS)
            w_3 = _fragment(weights[step * parts + 3], WARPS)
            w = _stack(w, _stack(w_2, w_3, WARPS, 8), WARPS, 16)
        sums = tl.dot(x, tl.permute(w, (0, 2, 1)), sums, input_precision="ieee")
    return sums


@triton.jit
def skinny_rows_kernel(
    x_ptr,  # [M, K]; gate and up [M, 2 K] if GATED
    residual_ptr,  # [M, K] or None
    norm_ptr,  # [K] if NORM
    w_ptr,  # [N, K]
    bias_ptr,  # [N] or None
    out_ptr,  # [M, N]
    total_ptr,  # [M, K] with a residual
    M,
    N,
    eps,
    K: tl.constexpr,
    PROLOGUE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
    OVER_8: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_N
    num_chunks: tl.constexpr = (K + WARPS * 32 * STEPS - 1) // (WARPS * 32 * STEPS)
    weights = _load_weights(w_ptr, first_row, 0, N, K, BLOCK_N, WARPS, STEPS)
    if PDL:
        tl.extra.cuda.gdc_wait()

    sums = tl.zeros((WARPS, 16, BLOCK_N), tl.float32)
    upper_squares = tl.zeros((8, WARPS, 32), tl.float32)
    lower_squares = tl.zeros((8, WARPS, 32), tl.float32)
    for chunk in range(num_chunks):
        current = weights
        if num_chunks > 1:
            weights = _load_weights(w_ptr, first_row, chunk + 1, N, K, BLOCK_N, WARPS, STEPS)
        upper, upper_squares = _inputs(
            x_ptr, residual_ptr, norm_ptr, total_ptr, upper_squares, 0, M, chunk, K, PROLOGUE, WARPS, STEPS
        )
        lower = upper
        if OVER_8:
            lower, lower_squares = _inputs(
                x_ptr, residual_ptr, norm_ptr, total_ptr, lower_squares, 8, M, chunk, K, PROLOGUE, WARPS, STEPS
            )
        sums = _multiply(current, upper, lower, sums, BLOCK_N, WARPS, STEPS, OVER_8)

    result = tl.sum(sums, 0)
    if PROLOGUE == NORM:
        both = tl.join(tl.sum(tl.sum(upper_squares, 2), 1), tl.sum(tl.sum(lower_squares, 2), 1))
        result *= tl.rsqrt(tl.reshape(tl.permute(both, (1, 0)), (16,)) / K + eps)[:, None]
    row = tl.arange(0, 16)[:, None]
    column = first_row + tl.arange(0, BLOCK_N)[None, :]
    if bias_ptr is not None:
        result += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + column, result.to(out_ptr.dtype.element_ty), mask=(row < M) & (column < N))
