"""`PrefixCache`: what is found, what is not, and when a block becomes findable."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from engine.api.request import Prompt
from engine.api.sampling import SamplingParams
from engine.core import prefix_cache
from engine.core.block_pool import BlockPool
from engine.core.prefix_cache import PrefixCache
from engine.core.sequence import Sequence

BLOCK_SIZE = 4


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(32, BLOCK_SIZE)


@pytest.fixture
def cache(pool: BlockPool) -> PrefixCache:
    return PrefixCache(pool, is_enabled=True)


def make(token_ids: list[int], *, salt: str = "") -> Sequence:
    prompt = Prompt(1, tuple(token_ids), 100, SamplingParams(), cache_salt=salt)
    return Sequence(prompt, arrival=0, max_model_len=1000)


def compute(sequence: Sequence, pool: BlockPool, cache: PrefixCache, num_tokens: int | None = None) -> Sequence:
    """Give the sequence blocks and count its tokens as computed, as the scheduler does."""
    num_blocks = -(-len(sequence.token_ids) // BLOCK_SIZE)
    sequence.block_table += pool.allocate(num_blocks - len(sequence.block_table))
    sequence.num_computed_tokens = len(sequence.token_ids) if num_tokens is None else num_tokens
    cache.offer(sequence)
    return sequence


def test_finds_the_common_full_blocks(pool: BlockPool, cache: PrefixCache) -> None:
    first = compute(make([*range(10)]), pool, cache)
    assert cache.find(make([*range(8), 99, 99, 99])) == first.block_table[:2]
    assert cache.find(make([0, 1, 2, 3, 99, 99, 99, 99, 99])) == first.block_table[:1]
    assert cache.find(make([99, *range(1, 10)])) == []


def test_the_same_tokens_after_another_prefix_are_not_found(pool: BlockPool, cache: PrefixCache) -> None:
    compute(make([1, 1, 1, 1, 5, 6, 7, 8, 9]), pool, cache)
    compute(make([2, 2, 2, 2, 0]), pool, cache)
    assert len(cache.find(make([2, 2, 2, 2, 5, 6, 7, 8, 9]))) == 1
    assert cache.find(make([5, 6, 7, 8, 9])) == []


def test_a_full_hit_leaves_one_token_to_compute(pool: BlockPool, cache: PrefixCache) -> None:
    first = compute(make([*range(8)]), pool, cache)
    assert cache.find(make([*range(8)])) == first.block_table[:1]
    assert cache.find(make([*range(9)])) == first.block_table[:2]


def test_salts_do_not_share(pool: BlockPool, cache: PrefixCache) -> None:
    compute(make([*range(9)], salt="alice"), pool, cache)
    assert cache.find(make([*range(9)], salt="bob")) == []
    assert cache.find(make([*range(9)])) == []
    assert len(cache.find(make([*range(9)], salt="alice"))) == 2


def test_a_salt_cannot_pose_as_a_block() -> None:
    """Salts are hashed in a domain of their own: no text has the digest of a block with the same bytes."""
    root = prefix_cache._root_hash("any bytes at all")
    assert root != prefix_cache.blake2b(b"any bytes at all", digest_size=prefix_cache.HASH_BYTES).digest()


def test_only_computed_full_blocks_are_offered(pool: BlockPool, cache: PrefixCache) -> None:
    sequence = compute(make([*range(12)]), pool, cache, num_tokens=7)
    assert pool.num_cached == 1
    sequence.num_computed_tokens = 8
    cache.offer(sequence)
    assert pool.num_cached == 2


def test_a_block_with_a_pending_token_is_offered_once_the_token_is_known(pool: BlockPool, cache: PrefixCache) -> None:
    sequence = make([0, 1, 2])
    sequence.block_table = pool.allocate(1)
    # Two steps are scheduled: one computes the prompt and samples, the next computes the token it sampled.
    sequence.num_tokens, sequence.num_computed_tokens = 5, 4
    cache.offer(sequence)
    assert pool.num_cached == 0
    sequence.token_ids.append(3)
    cache.offer(sequence)
    assert cache.find(make([0, 1, 2, 3, 4])) == sequence.block_table


def test_adopts_what_another_sequence_computed_meanwhile(pool: BlockPool, cache: PrefixCache) -> None:
    late = make([*range(17)])
    compute(late, pool, cache, num_tokens=4)
    early = compute(make([*range(13)]), pool, cache)
    own = list(late.block_table)
    assert cache.adopt(late)
    assert late.block_table == [own[0], *early.block_table[1:3], *own[3:]]
    assert late.num_computed_tokens == 12
    assert late.num_cached_tokens == 8
    assert [pool.ref_count(block_id) for block_id in late.block_table] == [1, 2, 2, 1, 1]
    assert [pool.ref_count(block_id) for block_id in own[1:3]] == [0, 0]
    assert not cache.adopt(late)
    pool.check_integrity()


def test_adopts_nothing_inside_a_block(pool: BlockPool, cache: PrefixCache) -> None:
    late = compute(make([*range(17)]), pool, cache, num_tokens=5)
    compute(make([*range(13)]), pool, cache)
    assert not cache.adopt(late)


def test_each_block_is_hashed_once(pool: BlockPool, cache: PrefixCache) -> None:
    sequence = make([*range(41)])
    with patch.object(prefix_cache, "blake2b", wraps=prefix_cache.blake2b) as hash_function:
        cache.find(sequence)
        cache.find(sequence)
        compute(sequence, pool, cache)
        sequence.token_ids += [41, 42, 43]
        compute(sequence, pool, cache)
    num_roots = 1
    assert hash_function.call_count == num_roots + 11


def test_outputs_continue_the_chain(pool: BlockPool, cache: PrefixCache) -> None:
    sequence = compute(make([0, 1, 2, 3, 4]), pool, cache)
    sequence.token_ids += [5, 6, 7]
    compute(sequence, pool, cache)
    assert cache.find(make([*range(9)])) == sequence.block_table


def test_large_token_ids_are_hashed(pool: BlockPool, cache: PrefixCache) -> None:
    compute(make([2**40, 1, 2, 3, 4]), pool, cache)
    assert cache.find(make([0, 1, 2, 3, 4])) == []


def test_a_disabled_cache_neither_hashes_nor_finds(pool: BlockPool) -> None:
    cache = PrefixCache(pool, is_enabled=False)
    sequence = compute(make([*range(9)]), pool, cache)
    assert sequence.block_hashes == []
    assert cache.find(make([*range(9)])) == []
    assert pool.num_cached == 0


def test_a_cleared_cache_finds_nothing(pool: BlockPool, cache: PrefixCache) -> None:
    compute(make([*range(9)]), pool, cache)
    cache.clear()
    assert cache.find(make([*range(9)])) == []
