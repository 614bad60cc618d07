"""Paged attention against dense attention over the same keys, for ragged batches in shuffled blocks."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from engine.attention.backend import AttentionMetadata, AttentionSpec, CacheSpec
from engine.attention.torch_paged import TorchPagedAttention
from engine.layers.rotary import Rotation

CPU = torch.device("cpu")


def dense_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last T of L tokens: query [T, H, D], keys and values [L, Hkv, D]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    num_tokens, context_len = query.shape[0], keys.shape[0]
    scores = torch.einsum("thd,lhd->htl", query, keys) * query.shape[2] ** -0.5
    positions = torch.arange(context_len - num_tokens, context_len)
    scores = scores.masked_fill(torch.arange(context_len) > positions[:, None], float("-inf"))
    return torch.einsum("htl,lhd->thd", scores.softmax(-1), values)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 64), (9, 3, 64), (8, 1, 96), (16, 1, 128)])
def test_equals_dense_attention(block_size, num_heads, num_kv_heads, head_dim):
    # (context length, tokens of this step); decodes first, then fresh, chunked and one-token prefills.
    ragged = [(1, 1), (17, 1), (200, 1), (16, 1), (33, 1), (40, 40), (90, 27), (7, 7), (65, 1)]
    num_decodes = 5
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    spec = CacheSpec(2, num_kv_heads, head_dim, block_size, torch.float32)
    backend = TorchPagedAttention(AttentionSpec(spec, num_heads, len(ragged)), CPU)
    num_blocks = sum(-(-context_len // block_size) for context_len, _ in ragged)
    backend.allocate(num_blocks)
    free_blocks = torch.randperm(num_blocks, generator=generator).tolist()
    block_tables = torch.zeros((len(ragged), 256 // block_size + 1), dtype=torch.int32)

    contexts, queries, slots = [], [], []
    for sequence, (context_len, num_tokens) in enumerate(ragged):
        count = -(-context_len // block_size)
        block_tables[sequence, :count] = torch.tensor([free_blocks.pop() for _ in range(count)])
        positions = torch.arange(context_len)
        slots.append(block_tables[sequence, positions // block_size].long() * block_size + positions % block_size)
        contexts.append((random(context_len, num_kv_heads, head_dim), random(context_len, num_kv_heads, head_dim)))
        queries.append(random(num_tokens, num_heads, head_dim))

    # What earlier steps stored, then this step; on layer 1, so that layers are seen to be apart.
    for sequence, (context_len, num_tokens) in enumerate(ragged):
        if context_len > num_tokens:
            earlier = slots[sequence][:-num_tokens]
            keys, values = (cached[:-num_tokens] for cached in contexts[sequence])
            rows = torch.tensor([sequence], dtype=torch.int32)
            backend.begin_step(_metadata([(len(earlier), len(earlier))], 0, earlier, block_tables, rows))
            backend.attend(
                1, _pack(torch.zeros(len(earlier), num_heads, head_dim), keys, values), _still(earlier, head_dim), None
            )
    step_slots = torch.cat([s[-n:] for s, (_, n) in zip(slots, ragged, strict=True)])
    rows = torch.arange(len(ragged), dtype=torch.int32)
    backend.begin_step(_metadata(ragged, num_decodes, step_slots, block_tables, rows))
    keys, values = (
        torch.cat([pair[index][-n:] for pair, (_, n) in zip(contexts, ragged, strict=True)]) for index in (0, 1)
    )
    output = backend.attend(1, _pack(torch.cat(queries), keys, values), _still(step_slots, head_dim), None)

    expected = torch.cat([dense_attention(q, k, v) for q, (k, v) in zip(queries, contexts, strict=True)])
    torch.testing.assert_close(output, expected.flatten(1), atol=2e-6, rtol=1e-5)


def _metadata(
    ragged: list[tuple[int, int]],
    num_decodes: int,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
) -> AttentionMetadata:
    context_lens = tuple(context_len for context_len, _ in ragged)
    return AttentionMetadata(
        num_decodes=num_decodes,
        slot_mapping=slot_mapping,
        block_tables=block_tables,
        rows=rows,
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        query_starts=(0, *accumulate(n for _, n in ragged)),
        host_context_lens=context_lens,
    )


def _pack(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat((query, keys, values), dim=1).flatten(1)


def _still(slots: torch.Tensor, head_dim: int) -> Rotation:
    """A rotation by nothing."""
    return Rotation(torch.ones(len(slots), head_dim // 2), torch.zeros(len(slots), head_dim // 2))
