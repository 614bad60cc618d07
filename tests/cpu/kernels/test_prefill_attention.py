"""Paged prefill attention against dense attention in float32, for ragged batches in shuffled blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from engine.kernels.prefill_attention import (
    EMPTY_TILE,
    PrefillTuning,
    choose_tuning,
    dense_prefill,
    plan_prefill,
    prefers_dense,
    prefill_attention,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter multiplies the bits of bfloat16 matrices as if they were integers.
HALF_DTYPES = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]
POISON = 777.0
TUNING = PrefillTuning(block_m=32, block_n=32, group=1, num_warps=4, num_stages=1)
# (context length, tokens of this step): two decodes in front, then fresh prompts, chunks and one-token chunks.
RAGGED = [(5, 1), (40, 1), (7, 7), (33, 33), (64, 64), (1, 1), (90, 27), (65, 1), (48, 16), (97, 32)]
NUM_DECODES = 2


@dataclass(frozen=True)
class Batch:
    """A ragged batch on the device, its keys and values both paged and as plain lists."""

    qkv: torch.Tensor
    caches: torch.Tensor
    block_tables: torch.Tensor
    rows: torch.Tensor
    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    contexts: list[torch.Tensor]


def make_batch(ragged, num_heads, num_kv_heads, head_dim, block_size, dtype) -> Batch:
    """What is not a key or a value of the batch is NaN: cache lines, and the key and value part of qkv."""
    generator = torch.Generator().manual_seed(num_heads * head_dim + block_size)
    query_starts = (0, *accumulate(num_tokens for _, num_tokens in ragged))
    qkv = torch.randn((query_starts[-1], (num_heads + 2 * num_kv_heads) * head_dim), generator=generator)
    qkv[:, num_heads * head_dim :] = torch.nan
    counts = [-(-context_len // block_size) for context_len, _ in ragged]
    free_blocks = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    caches = torch.full((2, len(free_blocks), num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    rows = torch.randperm(len(ragged) + 2, generator=generator)[: len(ragged)].to(torch.int32)
    block_tables = torch.full((len(ragged) + 2, max(counts) + 2), 2**31 - 1, dtype=torch.int32)
    contexts = []
    for row, count, (context_len, _) in zip(rows.tolist(), counts, ragged, strict=True):
        blocks = torch.tensor([free_blocks.pop() for _ in range(count)])
        block_tables[row, :count] = blocks
        positions = torch.arange(context_len)
        context = torch.randn((2, context_len, num_kv_heads, head_dim), generator=generator).to(dtype)
        caches[:, blocks[positions // block_size], :, positions % block_size] = context.transpose(0, 1)
        contexts.append(context)
    return Batch(
        qkv.to(DEVICE, dtype),
        caches.to(DEVICE),
        block_tables.to(DEVICE),
        rows.to(DEVICE),
        query_starts,
        tuple(context_len for context_len, _ in ragged),
        contexts,
    )


def dense_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last T of L tokens: query [T, H, D], keys and values [L, Hkv, D], all float32."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    num_tokens, context_len = query.shape[0], keys.shape[0]
    scores = torch.einsum("thd,lhd->htl", query, keys) * query.shape[2] ** -0.5
    positions = torch.arange(context_len - num_tokens, context_len)
    scores = scores.masked_fill(torch.arange(context_len) > positions[:, None], float("-inf"))
    return torch.einsum("htl,lhd->thd", scores.softmax(-1), values)


def check(
    num_heads,
    num_kv_heads,
    head_dim,
    *,
    block_size=16,
    dtype=torch.float32,
    tuning=TUNING,
    ragged=None,
    first=NUM_DECODES,
) -> None:
    ragged = ragged or RAGGED
    batch = make_batch(ragged, num_heads, num_kv_heads, head_dim, block_size, dtype)
    tiles = torch.from_numpy(plan_prefill(batch.query_starts, batch.context_lens, first, tuning)).to(DEVICE)
    out = torch.full((batch.query_starts[-1], num_heads * head_dim), POISON, device=DEVICE, dtype=dtype)
    keys, values = batch.caches
    prefill_attention(batch.qkv, keys, values, batch.block_tables, batch.rows, tiles, out, tuning)

    expected = torch.full(out.shape, POISON)
    queries = batch.qkv[:, : num_heads * head_dim].cpu().float()
    for sequence in range(first, len(ragged)):
        lines = slice(batch.query_starts[sequence], batch.query_starts[sequence + 1])
        query = queries[lines].view(-1, num_heads, head_dim)
        expected[lines] = dense_attention(query, *batch.contexts[sequence].float()).flatten(1)
    tolerance = {"atol": 3e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1.5e-2, "rtol": 2e-2}
    torch.testing.assert_close(out.cpu().float(), expected, **tolerance)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_head_and_block_sizes(head_dim, block_size):
    check(2, 1, head_dim, block_size=block_size, ragged=RAGGED[:8])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "group"),
    [(2, 2, 1), (6, 2, 1), (3, 1, 4), (8, 2, 4), (8, 2, 2), (6, 1, 2), (7, 1, 1), (7, 1, 8), (16, 1, 16), (12, 1, 4)],
)
def test_query_heads_that_share_a_key_head(num_heads, num_kv_heads, group):
    check(num_heads, num_kv_heads, 64, tuning=replace(TUNING, group=group), ragged=RAGGED[:5] + RAGGED[6:8])


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 64), (64, 16), (64, 32), (64, 64)])
def test_tile_shapes(block_m, block_n):
    check(4, 2, 64, tuning=replace(TUNING, block_m=block_m, block_n=block_n, group=2))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 128), (3, 1, 96), (4, 2, 64), (2, 1, 256)])
def test_half_precision_as_tuned(num_heads, num_kv_heads, head_dim, dtype):
    for num_tokens, context in ((1, 100), (10**6, 100), (10**6, 10**5)):  # few programs and many, short and long
        tuning = choose_tuning(num_heads, num_kv_heads, head_dim, dtype, num_tokens, context, DEVICE)
        check(num_heads, num_kv_heads, head_dim, dtype=dtype, tuning=tuning, ragged=RAGGED[1:8], first=1)


def test_float32_as_tuned():
    check(8, 2, 128, tuning=choose_tuning(8, 2, 128, torch.float32, 10**6, 10**5, DEVICE))


def test_lengths_around_the_edges_of_tiles():
    ragged = [(n, n) for n in (31, 32, 33)] + [(32 + n, n) for n in (31, 32, 33)] + [(95 + n, 2) for n in (0, 1, 2, 3)]
    check(2, 1, 64, ragged=ragged, first=0)


def test_large_scores_do_not_overflow():
    batch = make_batch([(40, 40)], 1, 1, 64, 16, torch.float32)
    batch.qkv.mul_(1e4)
    tiles = torch.from_numpy(plan_prefill(batch.query_starts, batch.context_lens, 0, TUNING)).to(DEVICE)
    out = torch.empty((40, 64), device=DEVICE)
    prefill_attention(batch.qkv, *batch.caches, batch.block_tables, batch.rows, tiles, out, TUNING)
    query = batch.qkv[:, :64].cpu().view(40, 1, 64)
    expected = dense_attention(query, *batch.contexts[0]).flatten(1)
    torch.testing.assert_close(out.cpu(), expected, atol=2e-3, rtol=2e-3)


def test_plan_covers_every_new_token_once_longest_first():
    starts = (0, *accumulate(num_tokens for _, num_tokens in RAGGED))
    contexts = [context_len for context_len, _ in RAGGED]
    tiles = plan_prefill(starts, contexts, NUM_DECODES, replace(TUNING, group=2))
    assert tiles.dtype == np.int32 and tiles.flags.c_contiguous
    covered = []
    for sequence, first_token, num_tokens, position in tiles.tolist():
        context_len, num_new = RAGGED[sequence]
        assert 1 <= num_tokens <= 16
        assert position - (context_len - num_new) == first_token - starts[sequence]
        covered += range(first_token, first_token + num_tokens)
    assert sorted(covered) == list(range(starts[NUM_DECODES], starts[-1]))
    ends = (tiles[:, 2] + tiles[:, 3]).tolist()
    assert all(later < earlier + TUNING.block_n for earlier, later in pairwise(ends))


def test_plan_keeps_equal_sequences_together():
    tiles = plan_prefill((0, 64, 128), (1024, 1024), 0, replace(TUNING, block_m=16))
    assert tiles[:, 0].tolist() == [0] * 4 + [1] * 4


def test_plan_of_decodes_alone_is_empty():
    assert plan_prefill((0, 1, 2), (5, 9), 2, TUNING).shape == (0, 4)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 64), (4, 4, 128)])
def test_dense_prefill(num_heads, num_kv_heads, head_dim):
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    qkv = torch.randn((70, (num_heads + 2 * num_kv_heads) * head_dim), generator=torch.Generator().manual_seed(1))
    out = torch.full((70, num_heads * head_dim), POISON, device=DEVICE, dtype=dtype)
    dense_prefill(qkv.to(DEVICE, dtype), 3, 67, num_heads, num_kv_heads, head_dim, out)

    heads = qkv.to(dtype).float().view(70, -1, head_dim)[3:67]
    expected = torch.full(out.shape, POISON)
    expected[3:67] = dense_attention(*heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)).flatten(1)
    tolerance = {"atol": 3e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1.5e-2, "rtol": 2e-2}
    torch.testing.assert_close(out.cpu().float(), expected, **tolerance)


def test_dense_prefill_is_never_preferred_on_the_cpu():
    assert not prefers_dense(8192, 8192, torch.device("cpu"), torch.bfloat16, 128)


def test_empty_tiles_and_padded_rows_write_nothing():
    keys = torch.randn((2, 1, 16, 64), device=DEVICE)
    qkv = torch.randn((4, 3 * 64), device=DEVICE)
    out = torch.full((4, 64), 7.0, device=DEVICE)
    for row in (0, -1):
        rows = torch.tensor([row], dtype=torch.int32, device=DEVICE)
        tiles = torch.tensor([EMPTY_TILE] * 3, dtype=torch.int32, device=DEVICE)
        block_tables = torch.ones((1, 2), dtype=torch.int32, device=DEVICE)
        prefill_attention(qkv, keys, keys, block_tables, rows, tiles, out, replace(TUNING, group=1))
    assert (out == 7.0).all()
