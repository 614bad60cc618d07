"""`rotate_and_store` against the formulas written plainly: queries and keys in place, keys and values in slots."""

from __future__ import annotations

import pytest
import torch

from engine.attention.backend import HeadNorms
from engine.kernels.rotate_store import rotate_and_store

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = 777.0


def reference(qkv, first_token, cos, sin, slots, key_cache, value_cache, norms):
    """New qkv, key cache and value cache, in float32 arithmetic rounded once to the dtype."""
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    heads = qkv.view(len(qkv), -1, head_dim).float()
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)

    def normed(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + norms.eps).sqrt() * weight.float() if norms else x

    def rotated(x):
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos[:, None] - right * sin[:, None], right * cos[:, None] + left * sin[:, None]), -1)

    query = rotated(normed(query, norms.query_weight if norms else None))
    key = rotated(normed(key, norms.key_weight if norms else None))
    new_qkv, new_keys, new_values = qkv.clone(), key_cache.clone(), value_cache.clone()
    new_qkv[first_token:] = torch.cat((query, key, value), dim=1).flatten(1)[first_token:].to(qkv.dtype)
    for token in range(first_token, len(qkv)):
        slot = int(slots[token])
        if slot >= 0:
            new_keys[slot // block_size, :, slot % block_size] = key[token].to(qkv.dtype)
            new_values[slot // block_size, :, slot % block_size] = value[token].to(qkv.dtype)
    return new_qkv, new_keys, new_values


def check(num_heads, num_kv_heads, head_dim, block_size, *, with_norms, dtype, num_tokens=13, first_token=2, **options):
    generator = torch.Generator().manual_seed(head_dim + num_heads)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(DEVICE, dtype)
    angles = random(num_tokens, head_dim // 2)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    num_blocks = 2 * num_tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots[[first_token, num_tokens - 1]] = -1
    slots = slots.to(DEVICE)
    caches = torch.full((2, num_blocks, num_kv_heads, block_size, head_dim), POISON, device=DEVICE, dtype=dtype)
    norms = None
    if with_norms:
        norms = HeadNorms(random(head_dim).to(DEVICE, dtype), random(head_dim).to(DEVICE, dtype), 1e-5)

    expected = reference(qkv, first_token, cos, sin, slots, caches[0], caches[1], norms)
    rotate_and_store(qkv, first_token, cos, sin, slots, caches[0], caches[1], norms, **options)

    tolerance = {"atol": 3e-6, "rtol": 3e-6} if dtype == torch.float32 else {"atol": 1e-6, "rtol": 8e-3}
    for actual, wanted in zip((qkv, caches[0], caches[1]), expected, strict=True):
        torch.testing.assert_close(actual, wanted, **tolerance)
        assert torch.equal(actual == POISON, wanted == POISON)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("with_norms", [False, True])
def test_head_sizes_with_and_without_norms(head_dim, with_norms):
    check(4, 2, head_dim, 16, with_norms=with_norms, dtype=torch.float32)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (7, 1), (16, 1), (6, 6)])
def test_every_head_is_turned_or_stored_once(num_heads, num_kv_heads):
    check(num_heads, num_kv_heads, 64, 32, with_norms=True, dtype=torch.float32)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_slots_of_every_block_size(block_size):
    check(4, 2, 64, block_size, with_norms=False, dtype=torch.bfloat16, num_tokens=70)


@pytest.mark.parametrize("tokens_per_program", [1, 4, 8])
def test_token_groups_end_where_the_batch_ends(tokens_per_program):
    check(4, 2, 64, 16, with_norms=True, dtype=torch.bfloat16, first_token=3, tokens_per_program=tokens_per_program)


def test_values_are_stored_bit_for_bit():
    value = torch.tensor([3.140625, -0.0078125, 1e-30, 65280.0], dtype=torch.bfloat16).repeat(16)
    qkv = torch.cat((torch.zeros(128, dtype=torch.bfloat16), value))[None].to(DEVICE)
    cos, sin = torch.full((2, 1, 32), 0.5, device=DEVICE)
    caches = torch.zeros((2, 1, 1, 16, 64), dtype=torch.bfloat16, device=DEVICE)
    weights = torch.ones(64, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.tensor([5], device=DEVICE)
    rotate_and_store(qkv, 0, cos, sin, slots, caches[0], caches[1], HeadNorms(weights, weights, 1e-6))
    assert torch.equal(caches[1, 0, 0, 5].cpu(), value)
    assert torch.equal(qkv[0, 128:].cpu(), value)
