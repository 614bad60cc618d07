"""Attention over 131,072 tokens on a GPU: offsets beyond 32 bits, hundreds of splits, against plain fp32."""

from __future__ import annotations

import pytest
import torch

from engine.attention.backend import AttentionMetadata, AttentionSpec, CacheSpec
from engine.attention.triton_paged import TritonPagedAttention
from engine.layers.rotary import Rotation

GPU = torch.device("cuda")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
CONTEXT_LEN = 131_072
# Block ids of the upper half of a cache whose elements, 8.6 billion, need more than 32 bits to count.
NUM_BLOCKS = 2**19


def expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens: query [T, H, D], keys and values [L, Hkv, D], all in fp32."""
    num_tokens, group = query.shape[0], NUM_HEADS // NUM_KV_HEADS
    outputs = []
    for head in range(NUM_HEADS):
        scores = query[:, head] @ keys[:, head // group].T * HEAD_DIM**-0.5
        beyond = torch.ones_like(scores, dtype=torch.bool).triu(CONTEXT_LEN - num_tokens + 1)
        outputs.append(scores.masked_fill(beyond, float("-inf")).softmax(-1) @ values[:, head // group])
    return torch.stack(outputs, dim=1).flatten(1)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 48], ids=["decode", "prefill"])
def test_equals_plain_attention(num_tokens: int) -> None:
    generator = torch.Generator(device=GPU).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=GPU, dtype=torch.bfloat16)

    cache = CacheSpec(1, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.bfloat16)
    backend = TritonPagedAttention(AttentionSpec(cache, NUM_HEADS, max_num_seqs=4), GPU)
    backend.allocate(NUM_BLOCKS)
    num_context_blocks = CONTEXT_LEN // BLOCK_SIZE
    order = torch.randperm(num_context_blocks, generator=generator, device=GPU)
    block_ids = (NUM_BLOCKS - num_context_blocks + order).int()
    positions = torch.arange(CONTEXT_LEN, device=GPU)
    slots = block_ids[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE

    keys, values = random(CONTEXT_LEN, NUM_KV_HEADS, HEAD_DIM), random(CONTEXT_LEN, NUM_KV_HEADS, HEAD_DIM)
    query = random(num_tokens, NUM_HEADS, HEAD_DIM)
    assert backend._cache is not None
    (cached_keys,), (cached_values,) = backend._cache.keys, backend._cache.values
    # What earlier steps stored: everything but the step's own tokens.
    for stored, lines in ((cached_keys, keys), (cached_values, values)):
        blocks = lines.view(num_context_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM).transpose(1, 2)
        stored[block_ids.long()] = blocks
    new = slice(CONTEXT_LEN - num_tokens, CONTEXT_LEN)
    for stored in (cached_keys, cached_values):
        stored[slots[new] // BLOCK_SIZE, :, slots[new] % BLOCK_SIZE] = 0.0

    backend.begin_step(
        AttentionMetadata(
            num_decodes=int(num_tokens == 1),
            slot_mapping=slots[new],
            block_tables=block_ids[None],
            rows=torch.zeros(1, dtype=torch.int32, device=GPU),
            context_lens=torch.tensor([CONTEXT_LEN], dtype=torch.int32, device=GPU),
            query_starts=(0, num_tokens),
            host_context_lens=(CONTEXT_LEN,),
        )
    )
    still = torch.ones((num_tokens, HEAD_DIM // 2), device=GPU)
    qkv = torch.cat((query, keys[new], values[new]), dim=1).flatten(1)
    output = backend.attend(0, qkv, Rotation(still, torch.zeros_like(still)), None)
    torch.testing.assert_close(
        output.float(), expected(query.float(), keys.float(), values.float()), atol=2e-3, rtol=2e-2
    )
