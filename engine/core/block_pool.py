"""`BlockPool`: which KV cache blocks are in use, by how many sequences, and which to reuse next.

One doubly linked list holds the free blocks in eviction order.  A freed block whose content has a
hash goes to the back and stays findable until it is reused; one without goes to the front.  Every
operation is O(1) per block.  Knows nothing of tokens or sequences: hashes come from
`engine.core.prefix_cache`, allocation is asked for by `engine.core.scheduler`.  Nor does it know what
a block contains: `resize` says which contents are to be moved, and the caller has them moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, with ids 0 to num_blocks - 1."""

    __slots__ = (
        "_block_of_hash",
        "_hashes",
        "_next",
        "_num_free",
        "_previous",
        "_ref_counts",
        "block_size",
        "num_blocks",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        # The list is circular through a sentinel, index `num_blocks`: its next is the first block to reuse.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, those with cached content included."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks that `find` can return, in use or free."""
        return len(self._block_of_hash)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks in eviction order; what they cached is forgotten.

        The caller has checked `num_free`.
        """
        assert count <= self._num_free, f"{count} blocks asked of {self._num_free} free ones"
        taken = []
        following, first, sentinel = self._next, self._next[self.num_blocks], self.num_blocks
        for _ in range(count):
            self._ref_counts[first] = 1
            self._forget(first)
            taken.append(first)
            first = following[first]
        following[sentinel] = first
        self._previous[first] = sentinel
        self._num_free -= count
        return taken

    def share(self, block_id: int) -> None:
        """One more sequence uses a block that `find` returned."""
        if self._ref_counts[block_id] == 0:
            self._unlink(block_id)
        self._ref_counts[block_id] += 1

    def free(self, block_table: list[int]) -> None:
        """A sequence gives up its blocks, the last first, so that the start of a prefix is evicted last."""
        for block_id in reversed(block_table):
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} is freed twice"
            self._ref_counts[block_id] = count
            if count == 0:
                self._link(block_id)

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, in use or free."""
        return self._block_of_hash.get(block_hash)

    def set_hash(self, block_id: int, block_hash: bytes) -> None:
        """Make a block in use findable; another block that already has this content stays the one found."""
        assert self._ref_counts[block_id] > 0 and self._hashes[block_id] is None
        if block_hash not in self._block_of_hash:
            self._hashes[block_id] = block_hash
            self._block_of_hash[block_hash] = block_id

    def forget_hashes(self) -> None:
        """Make no block findable, whatever its content."""
        self._block_of_hash.clear()
        self._hashes = [None] * self.num_blocks

    def resize(self, num_blocks: int) -> list[tuple[int, int]]:
        """Have `num_blocks` from now on; returns (source, target) of each block whose content is to be moved.

        Free blocks are lost in eviction order, those in use never: the caller has checked that they fit.  What stays
        beyond the new end takes the id of a lost one, so no block is both source and target.
        """
        free = list(self.free_blocks())
        num_lost = max(0, self.num_blocks - num_blocks)
        assert num_lost <= self._num_free, f"{self.num_blocks - self._num_free} blocks in use exceed {num_blocks}"
        lost, kept = free[:num_lost], free[num_lost:]
        for block_id in lost:
            self._forget(block_id)
        moves = self._move_below(num_blocks, lost)
        added = range(self.num_blocks, num_blocks)
        self._ref_counts[num_blocks:] = [0] * len(added)
        self._hashes[num_blocks:] = [None] * len(added)
        self.num_blocks = num_blocks
        self._link_all([moves.get(block_id, block_id) for block_id in kept], added)
        return [(source, target) for source, target in moves.items() if self._has_content(target)]

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are on the free list, so that sharing them uses it up."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def free_blocks(self) -> Iterator[int]:
        """Free blocks in eviction order."""
        block_id = self._next[self.num_blocks]
        while block_id != self.num_blocks:
            yield block_id
            block_id = self._next[block_id]

    def check_integrity(self) -> None:
        """Assert that list, counts and hashes agree; O(num_blocks), for tests and debugging."""
        num_seen, previous = 0, self.num_blocks
        for block_id in self.free_blocks():
            assert self._previous[block_id] == previous, f"block {block_id} has a wrong back link"
            assert self._ref_counts[block_id] == 0, f"block {block_id} is free and in use"
            num_seen, previous = num_seen + 1, block_id
            assert num_seen <= self._num_free, "the free list holds more blocks than it counts"
        assert self._previous[self.num_blocks] == previous
        num_unused = sum(count == 0 for count in self._ref_counts)
        assert num_seen == self._num_free == num_unused, f"{num_unused - num_seen} blocks are lost"
        hashed = {block_hash: block_id for block_id, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert hashed == self._block_of_hash

    def _move_below(self, end: int, vacant: Iterable[int]) -> dict[int, int]:
        """Give each block from `end` on that is not vacant the id of a vacant one below; their new ids."""
        vacant = set(vacant)
        staying = (block_id for block_id in range(end, self.num_blocks) if block_id not in vacant)
        moves = dict(zip(staying, sorted(block_id for block_id in vacant if block_id < end), strict=True))
        for source, target in moves.items():
            self._ref_counts[target] = self._ref_counts[source]
            block_hash = self._hashes[target] = self._hashes[source]
            if block_hash is not None:
                self._block_of_hash[block_hash] = target
        return moves

    def _has_content(self, block_id: int) -> bool:
        return self._ref_counts[block_id] > 0 or self._hashes[block_id] is not None

    def _link_all(self, free: list[int], added: Iterable[int]) -> None:
        """Build the free list anew: `free` in this order, and `added` behind those of them that cache nothing."""
        num_plain = next((index for index, block_id in enumerate(free) if self._hashes[block_id]), len(free))
        order = [*free[:num_plain], *added, *free[num_plain:]]
        sentinel = self.num_blocks
        self._next, self._previous = [sentinel] * (sentinel + 1), [sentinel] * (sentinel + 1)
        for before, after in pairwise([sentinel, *order, sentinel]):
            self._next[before], self._previous[after] = after, before
        self._num_free = len(order)

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._block_of_hash[block_hash]
            self._hashes[block_id] = None

    def _link(self, block_id: int) -> None:
        sentinel = self.num_blocks
        if self._hashes[block_id] is None:
            before, after = sentinel, self._next[sentinel]
        else:
            before, after = self._previous[sentinel], sentinel
        self._next[before] = self._previous[after] = block_id
        self._previous[block_id], self._next[block_id] = before, after
        self._num_free += 1

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before], self._previous[after] = after, before
        self._num_free -= 1
