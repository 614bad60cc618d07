"""`BlockPool`: eviction order, sharing, and that no block is lost or given twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.block_pool import BlockPool


def hashed(pool: BlockPool, *names: bytes) -> list[int]:
    """One block in use per name, findable by it."""
    block_ids = pool.allocate(len(names))
    for block_id, name in zip(block_ids, names, strict=True):
        pool.set_hash(block_id, name)
    return block_ids


def test_allocates_each_block_once() -> None:
    pool = BlockPool(4, 16)
    assert sorted(pool.allocate(3) + pool.allocate(1)) == [0, 1, 2, 3]
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="1 blocks asked of 0 free ones"):
        pool.allocate(1)


def test_unhashed_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3, 16)
    cached = hashed(pool, b"a")
    plain = pool.allocate(2)
    pool.free(cached)
    pool.free(plain)
    assert pool.allocate(2) == plain
    assert pool.find(b"a") == cached[0]


def test_cached_blocks_are_evicted_least_recently_used_first_and_a_prefix_last() -> None:
    pool = BlockPool(4, 16)
    older, newer = hashed(pool, b"a0", b"a1"), hashed(pool, b"b0", b"b1")
    pool.free(older)
    pool.free(newer)
    assert list(pool.free_blocks()) == [older[1], older[0], newer[1], newer[0]]
    pool.allocate(1)
    assert pool.find(b"a1") is None
    assert pool.find(b"a0") == older[0]


def test_use_renews_a_cached_block() -> None:
    pool = BlockPool(2, 16)
    first, second = hashed(pool, b"a", b"b")
    pool.free([first])
    pool.free([second])
    pool.share(first)
    pool.free([first])
    assert list(pool.free_blocks()) == [second, first]


def test_a_shared_block_is_free_when_its_last_user_gives_it_up() -> None:
    pool = BlockPool(2, 16)
    (block_id,) = hashed(pool, b"a")
    pool.share(block_id)
    assert pool.ref_count(block_id) == 2
    pool.free([block_id])
    assert pool.num_free == 1
    pool.free([block_id])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block_id])


def test_a_reused_block_is_not_found_by_its_old_content() -> None:
    pool = BlockPool(1, 16)
    pool.free(hashed(pool, b"a"))
    assert pool.find(b"a") is not None
    pool.allocate(1)
    assert pool.find(b"a") is None
    assert pool.num_cached == 0


def test_equal_content_keeps_the_block_that_came_first() -> None:
    pool = BlockPool(2, 16)
    first, second = pool.allocate(2)
    pool.set_hash(first, b"a")
    pool.set_hash(second, b"a")
    assert pool.find(b"a") == first
    pool.free([second])
    assert pool.find(b"a") == first
    pool.check_integrity()


def test_counts_blocks_whose_sharing_uses_up_free_ones() -> None:
    pool = BlockPool(2, 16)
    in_use, free = hashed(pool, b"a", b"b")
    pool.free([free])
    assert pool.count_free([in_use, free]) == 1


def test_forgetting_hashes_frees_nothing() -> None:
    pool = BlockPool(2, 16)
    block_ids = hashed(pool, b"a", b"b")
    pool.forget_hashes()
    assert pool.find(b"a") is None
    assert pool.num_free == 0
    pool.free(block_ids)
    pool.check_integrity()


def test_integrity_check_notices_a_lost_block() -> None:
    pool = BlockPool(2, 16)
    pool.allocate(1)
    pool._ref_counts[0] = 0
    with pytest.raises(AssertionError, match="1 blocks are lost"):
        pool.check_integrity()


def test_growth_adds_blocks_behind_unused_ones_and_before_cached_ones() -> None:
    pool = BlockPool(3, 16)
    (cached,) = hashed(pool, b"a")
    pool.free([cached])
    assert pool.resize(5) == []
    assert list(pool.free_blocks()) == [1, 2, 3, 4, cached]
    pool.check_integrity()


def test_shrinking_moves_what_is_in_use_and_evicts_the_oldest_first() -> None:
    pool = BlockPool(6, 16)
    older, newer, in_use = (hashed(pool, name)[0] for name in (b"older", b"newer", b"in use"))
    others = pool.allocate(3)
    pool.free([older])
    pool.free([newer])
    pool.free(others[:2])
    assert (in_use, others) == (2, [3, 4, 5])
    assert pool.resize(3) == [(5, 0)]
    assert (pool.find(b"older"), pool.find(b"newer"), pool.find(b"in use")) == (None, newer, in_use)
    assert [pool.ref_count(block_id) for block_id in range(3)] == [1, 0, 1]
    pool.check_integrity()


def test_cached_blocks_beyond_the_new_end_move_rather_than_be_forgotten() -> None:
    pool = BlockPool(4, 16)
    unused = pool.allocate(3)
    (cached,) = hashed(pool, b"a")
    pool.free([cached])
    pool.free(unused)
    assert pool.resize(1) == [(cached, 0)]
    assert pool.find(b"a") == 0
    assert list(pool.free_blocks()) == [0]


def test_blocks_in_use_are_never_lost() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(3)
    with pytest.raises(AssertionError, match="3 blocks in use exceed 2"):
        pool.resize(2)
    assert pool.resize(3) == []
    assert pool.num_free == 0


class BlockPoolMachine(RuleBasedStateMachine):
    """Random holders of blocks against a plain model: reference counts as lists, the free list as a list."""

    @initialize(num_blocks=st.integers(1, 8))
    def create(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 16)
        self.free_order = list(range(num_blocks))
        self.holders: list[list[int]] = []
        self.names: dict[int, bytes] = {}
        self.num_names = 0

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free_order)))
        taken = self.pool.allocate(count)
        assert taken == self.free_order[:count]
        del self.free_order[:count]
        for block_id in taken:
            self.names.pop(block_id, None)
        self.holders.append(taken)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def name_a_block(self, data: st.DataObject) -> None:
        in_use = {block_id for holder in self.holders for block_id in holder} - self.names.keys()
        if in_use:
            block_id = data.draw(st.sampled_from(sorted(in_use)))
            self.num_names += 1
            self.names[block_id] = str(self.num_names).encode()
            self.pool.set_hash(block_id, self.names[block_id])

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.names)))
        assert self.pool.find(self.names[block_id]) == block_id
        self.pool.share(block_id)
        if block_id in self.free_order:
            self.free_order.remove(block_id)
        self.holders.append([block_id])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free(holder)
        still_used = {block_id for other in self.holders for block_id in other}
        for block_id in reversed(holder):
            if block_id not in still_used:
                place = len(self.free_order) if block_id in self.names else 0
                self.free_order.insert(place, block_id)

    @rule(wanted=st.integers(1, 16))
    def resize(self, wanted: int) -> None:
        """Free blocks are lost from the front of the order; all others keep name, users and place in it."""
        num_before = self.pool.num_blocks
        num_blocks = max(num_before - len(self.free_order), wanted)
        num_lost = max(0, num_before - num_blocks)
        lost, kept = self.free_order[:num_lost], self.free_order[num_lost:]
        moves = dict(self.pool.resize(num_blocks))
        assert all(source >= num_blocks > target and target in lost for source, target in moves.items())
        assert len(set(moves.values())) == len(moves)

        self.holders = [[moves.get(block_id, block_id) for block_id in holder] for holder in self.holders]
        self.names = {moves.get(block_id, block_id): self.names[block_id] for block_id in self.names.keys() - set(lost)}
        free_now = list(self.pool.free_blocks())
        cached = [moves.get(block_id, block_id) for block_id in kept]
        assert [block_id for block_id in free_now if block_id in self.names] == [
            block_id for block_id in cached if block_id in self.names
        ]
        assert len(free_now) == len(self.free_order) + num_blocks - num_before
        self.free_order = free_now

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert list(self.pool.free_blocks()) == self.free_order
        held = [block_id for holder in self.holders for block_id in holder]
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == held.count(block_id)
        assert self.pool.num_cached == len(self.names)
        assert all(self.pool.find(name) == block_id for block_id, name in self.names.items())


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, derandomize=True)
