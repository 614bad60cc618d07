"""The product of one row with a weight matrix, bound by reading the weights: a Triton kernel.

A program owns BLOCK_N rows of the weight and all of K.  It asks for its first weights before it
waits for the kernel that makes its input (see `engine.kernels.launch`), so that they arrive while
that one ends; with more tiles than programs it asks for the next tile before it reduces the
current one.  Products are fp32 on the ordinary cores: one row leaves the matrix units nothing to
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
def _load_vector(ptr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """K elements as ceil(K / BLOCK_K) tensors [BLOCK_K], zeros beyond K."""
    parts: tl.tuple = ()
    for step in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if (step + 1) * BLOCK_K > K:
            parts += (tl.load(ptr + k, mask=k < K, other=0.0),)
        else:
            parts += (tl.load(ptr + k),)
    return parts


@triton.jit
def _store_vector(ptr, parts, end, num_steps: tl.constexpr, BLOCK_K: tl.constexpr):
    """The first `end` elements of what `_load_vector` reads."""
    for step in tl.static_range(num_steps):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        tl.store(ptr + k, parts[step], mask=k < end)


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
def _scale(parts, gains, num_steps: tl.constexpr):
    """Products part by part, in fp32."""
    products: tl.tuple = ()
    for step in tl.static_range(num_steps):
        products += (parts[step].to(tl.float32) * gains[step].to(tl.float32),)
    return products


@triton.jit
def _sum_of_squares(parts, num_steps: tl.constexpr, BLOCK_K: tl.constexpr):
    squares = tl.zeros((BLOCK_K // 8,), tl.float32)
    for step in tl.static_range(num_steps):
        value = parts[step].to(tl.float32)
        squares += tl.sum(tl.reshape(value * value, (BLOCK_K // 8, 8)), 1)
    return tl.sum(squares)


@triton.jit
def _dot(weights, x, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Products summed in groups of 8 along K, which one thread holds: [BLOCK_N, BLOCK_K / 8] fp32."""
    partial = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    for step in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        products = weights[step].to(tl.float32) * x[step].to(tl.float32)[None, :]
        partial += tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // 8, 8)), 2)
    return partial


@triton.jit
def skinny_vector_kernel(
    x_ptr,  # [K]; gate and up [2 K] if GATED
    residual_ptr,  # [K] or None
    norm_ptr,  # [K] if NORM
    w_ptr,  # [N, K]
    bias_ptr,  # [N] or None
    out_ptr,  # [N]
    total_ptr,  # [K] with a residual
    N,
    eps,
    tiles_per_program,
    K: tl.constexpr,
    PROLOGUE: tl.constexpr,
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
    weights = _load_weights(w_ptr, tile, N, K, BLOCK_N, BLOCK_K, RAGGED)
    if PROLOGUE == NORM:
        gains = _load_vector(norm_ptr, K, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()

    x = _load_vector(x_ptr, K, BLOCK_K)
    second = x
    if PROLOGUE == GATED:
        second = _load_vector(x_ptr + K, K, BLOCK_K)
    if PROLOGUE == NORM and residual_ptr is not None:
        second = _load_vector(residual_ptr, K, BLOCK_K)
    scale = 1.0
    if PROLOGUE == GATED:
        # Through a loop the products stay packed, for half the registers; for one tile rounding is but work.
        x = gate_parts(x, second, num_steps, x_ptr.dtype.element_ty if LOOP else tl.float32)
    if PROLOGUE == NORM:
        if residual_ptr is not None:
            x = add_parts(x, second, num_steps)
            _store_vector(total_ptr, x, tl.where(tile == 0, K, 0), num_steps, BLOCK_K)
        scale = tl.rsqrt(_sum_of_squares(x, num_steps, BLOCK_K) / K + eps)
        x = _scale(x, gains, num_steps)

    for _ in range(tiles_per_program if LOOP else 1):
        rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        partial = _dot(weights, x, K, BLOCK_N, BLOCK_K)
        if LOOP:
            tile += tl.num_programs(0)
            weights = _load_weights(w_ptr, tile, N, K, BLOCK_N, BLOCK_K, True)
        result = tl.sum(partial, 1) * scale
        if bias_ptr is not None:
            result += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + rows, result.to(out_ptr.dtype.element_ty), mask=rows < N)
