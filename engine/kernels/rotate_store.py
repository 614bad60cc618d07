"""Norm, rotate and store the new heads of a prefill: queries and keys in place, keys and values into the paged cache.

One launch for all tokens and heads of a layer.  The work is pure memory traffic (2 bytes moved for every byte of
qkv, and the cache writes), so a program takes a few tokens times a few heads: enough 16-byte accesses in flight,
cosines and sines read once per token and program, and still many programs for a short prompt.  Called by the Triton
attention backend before any attention of the step; decodes rotate and store in their own attention kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from engine.kernels.launch import num_multiprocessors

if TYPE_CHECKING:
    from engine.attention.backend import HeadNorms

_HEADS_PER_PROGRAM = 8


@triton.jit(do_not_specialize=["first_token", "num_tokens"])
def _rotate_and_store_kernel(
    qkv,
    cos,
    sin,
    slot_mapping,
    key_cache,
    value_cache,
    query_weight,
    key_weight,
    eps,
    first_token,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """Grid (head groups, token groups): the groups of one token run side by side and share its cosines."""
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    NUM_ALL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    line = tl.arange(0, TOKENS * HEADS)
    token = first_token + tl.program_id(1) * TOKENS + line // HEADS
    head = tl.program_id(0) * HEADS + line % HEADS
    half = tl.arange(0, HALF_PADDED)
    inside = (token < num_tokens) & (head < NUM_ALL)
    is_query = head < NUM_HEADS
    is_rotated = head < NUM_ROTATED
    in_half = (half < HALF)[None, :]
    readable = inside[:, None] & in_half
    rotated = (inside & is_rotated)[:, None] & in_half
    token64 = token.to(tl.int64)

    elements = qkv + (token64 * (NUM_ALL * HEAD_DIM) + head * HEAD_DIM)[:, None] + half[None, :]
    left = tl.load(elements, mask=readable, other=0.0).to(tl.float32)
    right = tl.load(elements + HALF, mask=readable, other=0.0).to(tl.float32)
    # A value head turns by no angle, so that all heads share one code path.
    angles = (token64 * HALF)[:, None] + half[None, :]
    cosine = tl.load(cos + angles, mask=rotated, other=1.0)
    sine = tl.load(sin + angles, mask=rotated, other=0.0)
    slot = tl.load(slot_mapping + token, mask=inside, other=-1)

    if NORM:
        weights = tl.where(is_query[:, None], query_weight + half[None, :], key_weight + half[None, :])
        scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / HEAD_DIM + eps)
        scale = tl.where(is_rotated, scale, 1.0)[:, None]
        left *= scale * tl.load(weights, mask=rotated, other=1.0).to(tl.float32)
        right *= scale * tl.load(weights + HALF, mask=rotated, other=1.0).to(tl.float32)

    dtype = qkv.dtype.element_ty
    new_left = (left * cosine - right * sine).to(dtype)
    new_right = (right * cosine + left * sine).to(dtype)
    tl.store(elements, new_left, mask=rotated)
    tl.store(elements + HALF, new_right, mask=rotated)

    kv_head = tl.where(is_rotated, head - NUM_HEADS, head - NUM_ROTATED)
    block_id = slot // BLOCK_SIZE
    line_in_cache = (block_id * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    cached = (line_in_cache * HEAD_DIM)[:, None] + half[None, :]
    stored = (inside & (slot >= 0) & (head >= NUM_HEADS))[:, None] & in_half
    is_key = stored & is_rotated[:, None]
    is_value = stored & (head >= NUM_ROTATED)[:, None]
    tl.store(key_cache + cached, new_left, mask=is_key)
    tl.store(key_cache + cached + HALF, new_right, mask=is_key)
    tl.store(value_cache + cached, new_left, mask=is_value)
    tl.store(value_cache + cached + HALF, new_right, mask=is_value)


def _tokens_per_program(num_head_groups: int, num_tokens: int, device: torch.device) -> int:
    """4 tokens when even so every multiprocessor gets several programs, else 1: a short prompt must spread too."""
    return 4 if num_head_groups * num_tokens >= 16 * num_multiprocessors(device) else 1


def rotate_and_store(
    qkv: torch.Tensor,
    first_token: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    norms: HeadNorms | None,
    tokens_per_program: int = 0,
) -> None:
    """Norm and rotate the query and key heads of tokens `first_token`.. in place; store keys and values.

    `qkv` [T, (H + 2 Hkv) D] contiguous: query, key and value heads.  `cos`, `sin` float32 [T, D / 2] turn the pairs
    (x[i], x[i + D / 2]) (Su et al. 2021, https://arxiv.org/abs/2104.09864, halves instead of neighbours).
    `slot_mapping` int64 [T]: block id x BS + offset, or -1 to store nothing.  `key_cache`, `value_cache`
    [num_blocks, Hkv, BS, D]: one layer, contiguous, in the dtype of `qkv`.  `norms`: x / sqrt(mean(x²) + eps) x weight
    per head, before the rotation (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).  Arithmetic is float32.
    `tokens_per_program` (a power of 2) overrides the heuristic, for timing.
    """
    num_tokens, width = qkv.shape
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    num_all_heads = width // head_dim
    num_head_groups = -(-num_all_heads // _HEADS_PER_PROGRAM)
    num_new = num_tokens - first_token
    tokens = tokens_per_program or _tokens_per_program(num_head_groups, num_new, qkv.device)
    _rotate_and_store_kernel[(num_head_groups, -(-num_new // tokens))](
        qkv,
        cos,
        sin,
        slot_mapping,
        key_cache,
        value_cache,
        qkv if norms is None else norms.query_weight,
        qkv if norms is None else norms.key_weight,
        0.0 if norms is None else norms.eps,
        first_token,
        num_tokens,
        NUM_HEADS=num_all_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NORM=norms is not None,
        TOKENS=tokens,
        HEADS=_HEADS_PER_PROGRAM,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        num_warps=tokens,
    )
