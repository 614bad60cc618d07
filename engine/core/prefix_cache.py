"""`PrefixCache`: finds blocks that already hold the keys and values of a sequence's next tokens.

A full block is identified by a chain: blake2b of the previous block's hash and the block's own token
ids, starting from the request's cache salt.  128-bit digests make a collision no practical question.
Hashes are computed once per block and kept on the sequence.

When a block may be found.  Its tokens must be known to the host and the step that computes it must
have been scheduled; it need not have run.  The device runs steps in the order they were scheduled,
and within a step each attention layer stores the keys and values of prompts before it reads any
(`engine.attention.backend`).  Those of decodes need not be stored first: a sequence that computes one
token and samples never completes a block that another finds in the same step.  Whoever finds a block
is scheduled later, so it reads what has been written, for every pipeline depth.  That is why sequences
with a common prefix that arrive together compute it once.  Only a step that fails breaks the promise;
then `Scheduler.abort_all` clears the cache.

Called by `engine.core.scheduler`; the blocks themselves belong to `engine.core.block_pool`.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from engine.core.block_pool import BlockPool
from engine.core.sequence import Sequence

HASH_BYTES = 16
TOKEN_BYTES = 8


class PrefixCache:
    """Looks up and offers blocks of sequences; without `is_enabled` nothing is ever found."""

    __slots__ = ("_pool", "is_enabled")

    def __init__(self, pool: BlockPool, *, is_enabled: bool) -> None:
        self._pool = pool
        self.is_enabled = is_enabled

    def find(self, sequence: Sequence, first_index: int = 0) -> list[int]:
        """Cached blocks for the sequence's block table from `first_index` on, up to the first miss.

        The block with the last token is never asked for: computing it yields the next token.
        """
        found: list[int] = []
        if not self.is_enabled:
            return found
        _extend_hashes(sequence, self._pool.block_size)
        find = self._pool.find
        last_index = (len(sequence.token_ids) - 1) // self._pool.block_size
        for index in range(first_index, last_index):
            block_id = find(sequence.block_hashes[index])
            if block_id is None:
                break
            found.append(block_id)
        return found

    def adopt(self, sequence: Sequence) -> bool:
        """Let a running sequence at a block boundary skip blocks that another one has computed meanwhile.

        They replace its own, still empty, blocks in its table.  Returns whether there were any.
        """
        pool = self._pool
        first_index, num_tokens_inside = divmod(sequence.num_computed_tokens, pool.block_size)
        if num_tokens_inside:
            return False
        found = self.find(sequence, first_index)
        if not found:
            return False
        for block_id in found:
            pool.share(block_id)
        last_index = first_index + len(found)
        pool.free(sequence.block_table[first_index:last_index])
        sequence.block_table[first_index:last_index] = found
        sequence.num_hashed_blocks = last_index
        self.advance(sequence, len(found))
        return True

    def advance(self, sequence: Sequence, num_found: int) -> None:
        """Count the tokens of blocks just taken from the cache as computed."""
        num_tokens = num_found * self._pool.block_size
        sequence.num_computed_tokens += num_tokens
        if sequence.num_output_tokens == 0:
            sequence.num_cached_tokens += num_tokens

    def offer(self, sequence: Sequence) -> None:
        """Make every block findable whose tokens are all known and scheduled (the module says why)."""
        num_full_tokens = min(sequence.num_computed_tokens, len(sequence.token_ids))
        num_full = num_full_tokens // self._pool.block_size
        if num_full <= sequence.num_hashed_blocks or not self.is_enabled:
            return
        _extend_hashes(sequence, self._pool.block_size)
        for index in range(sequence.num_hashed_blocks, num_full):
            self._pool.set_hash(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_hashed_blocks = num_full

    def clear(self) -> None:
        self._pool.forget_hashes()


def _extend_hashes(sequence: Sequence, block_size: int) -> None:
    """Hash the full blocks of known tokens that have no hash yet."""
    hashes = sequence.block_hashes
    num_full = len(sequence.token_ids) // block_size
    if len(hashes) == num_full:
        return
    parent = hashes[-1] if hashes else _root_hash(sequence.prompt.cache_salt)
    packed = array("q", sequence.token_ids[len(hashes) * block_size : num_full * block_size]).tobytes()
    for start in range(0, len(packed), block_size * TOKEN_BYTES):
        block = packed[start : start + block_size * TOKEN_BYTES]
        parent = blake2b(parent + block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)


def _root_hash(cache_salt: str) -> bytes:
    # The personalisation keeps a crafted salt from passing for a block in the middle of a chain.
    return blake2b(cache_salt.encode(), digest_size=HASH_BYTES, person=b"cache salt").digest()
