"""The Triton backend against the torch one: the same steps, mixed and ragged, over caches that must stay alike."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from engine.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec, CacheSpec, HeadNorms
from engine.attention.torch_paged import TorchPagedAttention
from engine.attention.triton_paged import TritonPagedAttention
from engine.layers.rotary import RopeConfig, RotaryEmbedding

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 64, 16, 40

# Steps of (row, first position, number of tokens), decodes first.  Row 3 shares row 0's first two blocks in the
# very step that computes them.
STEPS = [
    (0, [(0, 0, 40), (1, 0, 5), (3, 32, 9)]),
    (2, [(0, 40, 1), (1, 5, 1), (2, 0, 33)]),
    (1, [(3, 41, 1), (2, 33, 20)]),
    (4, [(0, 41, 1), (1, 6, 1), (2, 53, 1), (3, 42, 1)]),
]
TABLES = {0: [7, 3, 11], 1: [5], 2: [20, 2, 9, 30], 3: [7, 3, 17]}


def metadata(num_decodes: int, sequences: list[tuple[int, int, int]], device: torch.device) -> AttentionMetadata:
    block_tables = torch.zeros((8, 6), dtype=torch.int32)
    for row, block_ids in TABLES.items():
        block_tables[row, : len(block_ids)] = torch.tensor(block_ids)
    slots = [
        TABLES[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for row, start, count in sequences
        for position in range(start, start + count)
    ]
    context_lens = tuple(start + count for _, start, count in sequences)
    return AttentionMetadata(
        num_decodes=num_decodes,
        slot_mapping=torch.tensor(slots, device=device),
        block_tables=block_tables.to(device),
        rows=torch.tensor([row for row, _, _ in sequences], dtype=torch.int32, device=device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        query_starts=(0, *accumulate(count for _, _, count in sequences)),
        host_context_lens=context_lens,
    )


@pytest.mark.parametrize("has_norms", [False, True])
def test_steps_give_what_torch_gives(has_norms: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = CacheSpec(2, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32)
    spec = AttentionSpec(cache, NUM_HEADS, max_num_seqs=8)
    weights = torch.rand((2, HEAD_DIM), generator=generator) + 0.5
    rope = RopeConfig(kind="default", theta=1e4, head_dim=HEAD_DIM)
    backends: list[tuple[AttentionBackend, torch.device]] = [
        (TorchPagedAttention(spec, CPU), CPU),
        (TritonPagedAttention(spec, DEVICE), DEVICE),
    ]
    for backend, _ in backends:
        backend.allocate(NUM_BLOCKS)
    for num_decodes, sequences in STEPS:
        num_tokens = sum(count for _, _, count in sequences)
        qkv = torch.randn((2, num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM), generator=generator)
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in sequences])
        outputs = []
        for backend, device in backends:
            rotation = RotaryEmbedding(rope, device=device)(positions.to(device))
            norms = HeadNorms(weights[0].to(device), weights[1].to(device), 1e-6) if has_norms else None
            backend.begin_step(metadata(num_decodes, sequences, device))
            layers = [backend.attend(layer, qkv[layer].clone().to(device), rotation, norms) for layer in (0, 1)]
            outputs.append(torch.stack(layers).cpu())
        torch.testing.assert_close(outputs[1], outputs[0], atol=2e-5, rtol=1e-5)
