"""The product of one to four rows with a weight matrix, bound by reading the weights: a Triton kernel.

A program owns BLOCK_N rows of the weight and all of K.  It asks for its first weights before it
waits for the kernel that makes its input (see `engine.kernels.launch`), so that they arrive while
that one ends; with more tiles than programs it asks for the next tile before it reduces the
current one.  Products are fp32 on the ordinary cores: so few rows leave the matrix units little to
do.  The input is made in registers by one of three prologues: as it is, add and RMS norm, or the
gated activation.  Launched by `engine.kernels.skinny_linear`.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
NORM = tl.constexpr(1)
GATED = tl.constexpr(2)


@triton.jit
def _load_weights(
    w_ptr,
    tile,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """The tile's weights as ceil(K / BLOCK_K) tensors [BLOCK_N, BLOCK_K]; rows at or beyond N read as zeros."""
    rows = tl.arange(0, BLOCK_N)
    inside_n = (tile * BLOCK_N + rows < N)[:, None]
    base = w_ptr + tile.to(tl.int64) * (BLOCK_N * K)
    tiles: tl.tuple = ()
    for step in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        pointers = base + rows[:, None] * K + k[None, :]
        if (step + 1) * BLOCK_K > K:
            mask = inside_n & (k < K)[None, :]
            tiles += (tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first"),)
        elif RAGGED:
            tiles += (tl.load(pointers, mask=inside_n, other=0.0, eviction_policy="evict_first"),)
        else:
            tiles += (tl.load(pointers, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _load_vectors(ptr, M, STRIDE: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr):
    """ROWS vectors of K elements, row after row as ceil(K / BLOCK_K) tensors [BLOCK_K] each, zeros beyond K.

    Rows at or beyond M repeat the last one.
    """
    parts: tl.tuple = ()
    for row in tl.static_range(ROWS):
        start = ptr + (tl.minimum(row, M - 1) * STRIDE if row > 0 else 0)
        for step in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            if (step + 1) * BLOCK_K > K:
                parts += (tl.load(start + k, mask=k < K, other=0.0),)
            else:
                parts += (tl.load(start + k),)
    return parts


@triton.jit
def _store_vectors(ptr, parts, num_rows, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr):
    """The first `num_rows` of what `_load_vectors` reads with a stride of K."""
    num_steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    for row in tl.static_range(ROWS):
        end = tl.where(row < num_rows, K, 0)
        for step in tl.static_range(num_steps):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            tl.store(ptr + row * K + k, parts[row * num_steps + step], mask=k < end)


@triton.jit
def gate_parts(gates, ups, num_steps: tl.constexpr, DTYPE: tl.constexpr):
    """silu(gate) · up part by part, in fp32 and rounded to DTYPE."""
    products: tl.tuple = ()
    for step in tl.static_range(num_steps):
        gate = gates[step].to(tl.float32)
        product = gate / (1.0 + tl.exp(-gate)) * ups[step].to(tl.float32)
        products += (product.to(DTYPE),)
    return products


@triton.jit
def add_parts(left, right, num_steps: tl.constexpr):
    """Sums part by part, rounded to the dtype of `left`."""
    sums: tl.tuple = ()
    for step in tl.static_range(num_steps):
        sums += ((left[step].to(tl.float32) + right[step].to(tl.float32)).to(left[step].dtype),)
    return sums


@triton.jit
def _multiply(parts, gains, num_steps: tl.constexpr, ROWS: tl.constexpr):
    """The parts of each row times `gains`, in fp32."""
    products: tl.tuple = ()
    for part in tl.static_range(ROWS * num_steps):
        products += (parts[part].to(tl.float32) * gains[part % num_steps].to(tl.float32),)
    return products


@triton.jit
def _inverse_norms(parts, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of each row: a scalar, or [ROWS]."""
    num_steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    partials: tl.tuple = ()
    for row in tl.static_range(ROWS):
        squares = tl.zeros((BLOCK_K // 8,), tl.float32)
        for step in tl.static_range(num_steps):
            value = parts[row * num_steps + step].to(tl.float32)
            squares += tl.sum(tl.reshape(value * value, (BLOCK_K // 8, 8)), 1)
        partials += (squares,)
    sums = tl.sum(_side_by_side(partials, ROWS), 0)
    if ROWS > 1:
        sums = tl.reshape(sums, (ROWS,))
    return tl.rsqrt(sums / K + eps)


@triton.jit
def _side_by_side(parts, ROWS: tl.constexpr):
    """Two tensors of one shape along a new last axis, four along two, one as it is."""
    if ROWS == 1:
        joined = parts[0]
    elif ROWS == 2:
        joined = tl.join(parts[0], parts[1])
    else:
        joined = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    return joined


@triton.jit
def _dots(weights, x, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr):
    """Products of each row, partly summed over K: [BLOCK_N, BLOCK_K / 8, ...] fp32, rows as in `_side_by_side`."""
    num_steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    partials: tl.tuple = ()
    for row in tl.static_range(ROWS):
        # In groups of 8 along K, which one thread holds.
        partial = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
        for step in tl.static_range(num_steps):
            products = weights[step].to(tl.float32) * x[row * num_steps + step].to(tl.float32)[None, :]
            partial += tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // 8, 8)), 2)
        partials += (partial,)
    return _side_by_side(partials, ROWS)


@triton.jit
def skinny_vector_kernel(
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
    tiles_per_program,
    K: tl.constexpr,
    PROLOGUE: tl.constexpr,
    ROWS: tl.constexpr,  # 1, 2 or 4; M or the next above
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOOP: tl.constexpr,
    RAGGED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    num_steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    stride: tl.constexpr = 2 * K if PROLOGUE == GATED else K
    weights = _load_weights(w_ptr, tile, N, K, BLOCK_N, BLOCK_K, RAGGED)
    if PROLOGUE == NORM:
        gains = _load_vectors(norm_ptr, 1, K, K, BLOCK_K, 1)
    if PDL:
        tl.extra.cuda.gdc_wait()

    x = _load_vectors(x_ptr, M, stride, K, BLOCK_K, ROWS)
    second = x
    if PROLOGUE == GATED:
        second = _load_vectors(x_ptr + K, M, stride, K, BLOCK_K, ROWS)
    if PROLOGUE == NORM and residual_ptr is not None:
        second = _load_vectors(residual_ptr, M, stride, K, BLOCK_K, ROWS)
    scale = 1.0
    if PROLOGUE == GATED:
        # Through a loop the products stay packed, for half the registers; for one tile rounding is but work.
        x = gate_parts(x, second, ROWS * num_steps, x_ptr.dtype.element_ty if LOOP else tl.float32)
    if PROLOGUE == NORM:
        if residual_ptr is not None:
            x = add_parts(x, second, ROWS * num_steps)
            _store_vectors(total_ptr, x, tl.where(tile == 0, M, 0), K, BLOCK_K, ROWS)
        scale = _inverse_norms(x, eps, K, BLOCK_K, ROWS)
        x = _multiply(x, gains, num_steps, ROWS)

    for _ in range(tiles_per_program if LOOP else 1):
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        partial = _dots(weights, x, K, BLOCK_N, BLOCK_K, ROWS)
        if LOOP:
            tile += tl.num_programs(0)
            weights = _load_weights(w_ptr, tile, N, K, BLOCK_N, BLOCK_K, True)
        result = tl.sum(partial, 1)
        if ROWS > 1:
            result = tl.reshape(result, (BLOCK_N, ROWS))
        result *= scale
        pointers = out_ptr + column
        present = column < N
        bias = tl.zeros((BLOCK_N,), tl.float32)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + column, mask=present, other=0.0).to(tl.float32)
        if ROWS > 1:
            row = tl.arange(0, ROWS)[None, :]
            pointers = pointers[:, None] + row * N
            present = present[:, None] & (row < M)
            bias = bias[:, None]
        tl.store(pointers, (result + bias).to(out_ptr.dtype.element_ty), mask=present)
