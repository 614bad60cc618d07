"""Causal attention of new tokens over their whole paged context: the prefill side of the Triton backend.

`plan_prefill` cuts the step's queries into tiles, once per step on the host; `prefill_attention` runs them, once per
layer.  Keys and values are read from the paged cache alone, so a cached prefix, an earlier chunk and the step's own
tokens are one case; `engine.kernels.rotate_store` has stored the step's own before.  The method is FlashAttention-2's
forward pass (Dao 2023, https://arxiv.org/abs/2307.08691).  `dense_prefill` hands long prompts with nothing cached to
cuDNN.  Called by the Triton attention backend; decodes have a kernel of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels.launch import num_multiprocessors

EMPTY_TILE = (0, 0, 0, 1)
"""A tile without tokens, for grids of a fixed size: it reads one key and writes nothing."""

_LOG2_E = 1.4426950408889634
_SHORT_CONTEXT = 1024

_DENSE_CHUNK = 1024
_DENSE_MIN_TOKENS = 2048
_DENSE_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Launch parameters: a program computes `block_m` query rows, `group` heads of one KV head for each token."""

    block_m: int
    block_n: int
    group: int
    num_warps: int
    num_stages: int

    @property
    def tokens_per_tile(self) -> int:
        return self.block_m // self.group


def choose_tuning(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_tokens: int,
    longest_context: int,
    device: torch.device,
) -> PrefillTuning:
    """The tuning for a step with `num_tokens` tokens to prefill, in contexts of up to `longest_context`.

    Heads that share a KV head share a tile, so that a tile spans fewer tokens and wastes less on the causal edge.  As
    the tile must have a power of 2 of them, G = 6 is taken in pairs and an odd G head by head.  Small tiles serve
    steps that would leave multiprocessors idle, short contexts, of which the causal edge is a large part, and GPUs
    with less shared memory than Hopper's.
    """
    per_kv_head = num_heads // num_kv_heads
    group = min(per_kv_head & -per_kv_head, 16)
    wide = head_dim > 128
    if dtype == torch.float32:
        return PrefillTuning(block_m=32, block_n=32, group=group, num_warps=4, num_stages=1)
    roomy = _has_large_shared_memory(device)
    if num_heads * num_tokens < 128 * num_multiprocessors(device):
        return PrefillTuning(64, 32 if wide else 64, group, num_warps=4, num_stages=3 if roomy else 2)
    if longest_context <= _SHORT_CONTEXT:
        return PrefillTuning(64, 32, group, num_warps=4, num_stages=3 if roomy else 2)
    if not roomy:
        return PrefillTuning(64, 32, group, 4, 2) if wide else PrefillTuning(128, 64, group, 8, 2)
    return PrefillTuning(128, 64, group, num_warps=8, num_stages=2 if wide else 3)


@cache
def _has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may use 227 KiB of shared memory: data-centre GPUs from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def plan_prefill(
    query_starts: Sequence[int], context_lens: Sequence[int], first_sequence: int, tuning: PrefillTuning
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Cut the queries of sequences `first_sequence`.. into tiles; int32 [num_tiles, 4], on the host.

    `query_starts` (S + 1) and `context_lens` (S) as in `AttentionMetadata`.  A tile is (sequence, index of its first
    token in the flat batch, number of tokens, position of the first token in the context).  Tiles with much to read
    come first, so that the last programs to start are short ones; among tiles of similar work those of one sequence
    stay together, which finds their keys in the L2 cache.
    """
    starts = np.asarray(query_starts[first_sequence:], dtype=np.int64)
    contexts = np.asarray(context_lens[first_sequence:], dtype=np.int64)
    num_tokens = np.diff(starts)
    size = tuning.tokens_per_tile
    num_tiles = -(-num_tokens // size)
    sequence = np.repeat(np.arange(len(num_tokens)), num_tiles)
    offset = (np.arange(len(sequence)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * size
    count = np.minimum(size, num_tokens[sequence] - offset)
    position = (contexts - num_tokens)[sequence] + offset
    work = position + count
    similar = max(tuning.block_n, int(work.max(initial=0)) // 8)
    order = np.lexsort((-work, sequence, -((work - 1) // similar)))
    tiles = np.stack((sequence + first_sequence, starts[sequence] + offset, count, position), axis=1)
    return tiles[order].astype(np.int32)


@triton.jit
def _prefill_attention_kernel(
    qkv,
    key_cache,
    value_cache,
    block_tables,
    rows,
    tiles,
    out,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Grid (head groups, tiles): all heads of a tile run side by side, those of one KV head next to each other."""
    PER_KV_HEAD: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    GROUPS: tl.constexpr = (PER_KV_HEAD + GROUP - 1) // GROUP
    WIDTH: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    BLOCK_STRIDE: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    kv_head = tl.program_id(0) // GROUPS
    tile = tiles + tl.program_id(1) * 4
    sequence = tl.load(tile)
    first_token = tl.load(tile + 1)
    num_tokens = tl.load(tile + 2)
    first_position = tl.load(tile + 3)
    # A row of -1 is padding, whose tiles read something and write nothing.
    table = block_tables + tl.maximum(tl.load(rows + sequence), 0).to(tl.int64) * table_stride

    line = tl.arange(0, BLOCK_M)
    step = line // GROUP
    head_in_group = tl.program_id(0) % GROUPS * GROUP + line % GROUP
    head = kv_head * PER_KV_HEAD + head_in_group
    token = (first_token + step).to(tl.int64)
    position = first_position + step
    dim = tl.arange(0, DIM_PADDED)
    wanted = ((step < num_tokens) & (head_in_group < PER_KV_HEAD))[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(qkv + (token * WIDTH + head * HEAD_DIM)[:, None] + dim[None, :], mask=wanted, other=0.0)

    keys = key_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = value_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    accumulator = tl.zeros((BLOCK_M, DIM_PADDED), tl.float32)
    end = first_position + num_tokens
    offset = tl.arange(0, BLOCK_N)
    # Past the end the last key is read again: finite numbers, whose weight the causal mask makes 0.  Unsigned, so
    # that dividing by the block size is a shift.
    key_position = tl.minimum(offset, end - 1).to(tl.uint32)
    block_id = tl.load(table + key_position // BLOCK_SIZE)
    for start in range(0, end, BLOCK_N):
        line_in_cache = block_id.to(tl.int64) * BLOCK_STRIDE + key_position % BLOCK_SIZE * HEAD_DIM
        element = line_in_cache[:, None] + dim[None, :]
        if DIM_PADDED == HEAD_DIM:
            key = tl.load(keys + element)
            value = tl.load(values + element)
        else:
            key = tl.load(keys + element, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            value = tl.load(values + element, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        # One step ahead, so that the pipelined loads of keys and values wait for no other load.
        key_position = tl.minimum(start + BLOCK_N + offset, end - 1).to(tl.uint32)
        block_id = tl.load(table + key_position // BLOCK_SIZE)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if start + BLOCK_N > first_position:
            scores = tl.where((start + offset)[None, :] <= position[:, None], scores, float("-inf"))
        # The scale is folded into the exponent: softmax(s * scale) = exp2((s - max) * scale * log2(e)), normalised.
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores * SCALE_LOG2 - (new_maximum * SCALE_LOG2)[:, None])
        correction = tl.exp2((maximum - new_maximum) * SCALE_LOG2)
        total = total * correction + tl.sum(weights, 1)
        accumulator = accumulator * correction[:, None]
        accumulator = tl.dot(weights.to(value.dtype), value, accumulator, input_precision="ieee")
        maximum = new_maximum

    result = (accumulator / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM)[:, None] + dim[None, :], result, mask=wanted)


def prefill_attention(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    tuning: PrefillTuning,
) -> None:
    """Write the attention of every token in `tiles` to its line of `out`; other lines stay as they are.

    `qkv` [T, (H + 2 Hkv) D] contiguous, queries rotated, only they are read.  `key_cache`, `value_cache`
    [num_blocks, Hkv, BS, D]: one layer, contiguous, BS a power of 2, the step's own tokens stored.  `block_tables`
    int32 [R, B]; `rows` int32 [S]: the line of each sequence.  `tiles` int32 [num_tiles, 4] on the device, from
    `plan_prefill` with the same `tuning`.  `out` [T, H D].  Scores are scaled by D ** -0.5; sums are float32.
    """
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    groups = -(-num_heads // (num_kv_heads * tuning.group))
    _prefill_attention_kernel[(num_kv_heads * groups, tiles.shape[0])](
        qkv,
        key_cache,
        value_cache,
        block_tables,
        rows,
        tiles,
        out,
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        SCALE_LOG2=head_dim**-0.5 * _LOG2_E,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        GROUP=tuning.group,
        DIM_PADDED=triton.next_power_of_2(head_dim),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def prefers_dense(num_tokens: int, context_len: int, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `dense_prefill` is the faster way for a sequence with `num_tokens` new of `context_len` tokens.

    cuDNN builds a plan for every length it meets, so only whole multiples of 1024, as a fixed token budget cuts long
    prompts, may ask for it: a handful of plans in a process.
    """
    return (
        num_tokens == context_len
        and num_tokens >= _DENSE_MIN_TOKENS
        and num_tokens % _DENSE_CHUNK == 0
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128)
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= _DENSE_CAPABILITY
        and torch.backends.cudnn.is_available()
    )


def dense_prefill(
    qkv: torch.Tensor, first: int, last: int, num_heads: int, num_kv_heads: int, head_dim: int, out: torch.Tensor
) -> None:
    """Write the causal attention of tokens `first`..`last` - 1, one sequence with nothing cached, to `out`.

    `qkv` [T, (H + 2 Hkv) D] with queries and keys rotated; `out` [T, H D].  cuDNN on the GPU, whatever torch picks on
    the CPU.
    """
    heads = qkv[first:last].view(1, last - first, -1, head_dim).transpose(1, 2)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    backend = SDPBackend.CUDNN_ATTENTION if qkv.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        result = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    out[first:last].view(1, last - first, num_heads, head_dim).copy_(result.transpose(1, 2))
