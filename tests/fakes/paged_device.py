"""A device without tensors: rows, block tables and KV slots as the runner keeps them, checked at every read.

A slot remembers which token, at which position, under which cache salt was written to it.  A step
stores the tokens of its prompts, then each decode stores its own and reads its context, then the prompts
read theirs; so a block that was shared wrongly, reused too early, never computed or not computed yet is
caught at the step that would have used it.  The "model"
is a pure function of all tokens so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from engine.api.output import FinishReason
from engine.api.request import Prompt
from engine.core.batch import SampledTokens, ScheduledBatch, ScheduledSequence
from engine.core.scheduler_config import SchedulerConfig

VOCAB_SIZE = 16


def next_token(token_ids: Sequence[int], prompt: Prompt) -> int:
    """What the model says after these tokens; stop tokens are masked before `min_tokens`, as the sampler does."""
    token_id = crc32(bytes(token_ids)) % VOCAB_SIZE
    if len(token_ids) - len(prompt.token_ids) < prompt.sampling.min_tokens:
        while token_id in prompt.stop_token_ids:
            token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def pool(token_ids: Sequence[int]) -> bytes:
    """What the model makes of these tokens where it does not continue them."""
    return crc32(bytes(token_ids)).to_bytes(4, "little")


def generate_alone(prompt: Prompt, max_model_len: int) -> tuple[list[int], FinishReason]:
    """The outputs a sequence must have, whatever ran beside it."""
    token_ids = list(prompt.token_ids)
    limit = min(len(token_ids) + prompt.max_tokens, max_model_len)
    while True:
        token_ids.append(next_token(token_ids, prompt))
        outputs = token_ids[len(prompt.token_ids) :]
        if outputs[-1] in prompt.stop_token_ids and len(outputs) > prompt.sampling.min_tokens:
            return outputs, "stop"
        if len(token_ids) == limit:
            return outputs, "length"


@dataclass
class _Row:
    prompt: Prompt
    token_ids: list[int]
    num_covered: int = 0
    block_table: list[int] = field(default_factory=list)


class PagedDevice:
    """Runs each batch at launch, in order, as a device queue does; `prompts` maps sequence ids to prompts."""

    def __init__(self, config: SchedulerConfig, prompts: dict[int, Prompt]) -> None:
        self._config = config
        self._prompts = prompts
        self._rows: dict[int, _Row] = {}
        self._slots: list[tuple[int, int, str] | None] = [None] * (config.num_blocks * config.block_size)
        self.num_tokens_computed = 0

    def launch(self, batch: ScheduledBatch) -> SampledTokens:
        self._check_limits(batch)
        self._apply(batch)
        written: set[int] = set()
        decodes, prompts = batch.sequences[: batch.num_decodes], batch.sequences[batch.num_decodes :]
        for scheduled in prompts:
            self._store(scheduled, written)
        sampled = self._attend_decodes(decodes, written)
        sampled += [self._attend(scheduled) for scheduled in prompts]
        token_ids = tuple(token_id for token_id in sampled if token_id is not None)
        pooled = tuple(pool(self._rows[scheduled.row].token_ids) for scheduled in prompts if scheduled.pools)
        self.num_tokens_computed += batch.num_tokens
        return SampledTokens(token_ids, (None,) * len(token_ids), pooled)

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Move the contents of blocks, then have `num_blocks`; whatever is read beyond them is an error."""
        block_size = self._config.block_size
        sources, targets = {source for source, _ in moves}, {target for _, target in moves}
        assert len(sources) == len(targets) == len(moves), "a block moves twice"
        assert not sources & targets, "what a block contains moves on before it is read"
        for source, target in moves:
            moved = self._slots[source * block_size :][:block_size]
            self._slots[target * block_size : (target + 1) * block_size] = moved
        num_new = max(0, num_blocks * block_size - len(self._slots))
        self._slots = self._slots[: num_blocks * block_size] + [None] * num_new

    def _check_limits(self, batch: ScheduledBatch) -> None:
        config = self._config
        assert 0 < batch.num_tokens <= config.max_num_batched_tokens
        assert len({s.row for s in batch.sequences}) == len(batch.sequences) <= config.max_num_seqs
        assert all(0 <= s.row < config.max_num_seqs for s in batch.sequences)
        decodes = [s.num_tokens == 1 and s.samples for s in batch.sequences]
        assert batch.num_pooled == sum(s.pools for s in batch.sequences)
        assert decodes == [True] * batch.num_decodes + [False] * (len(decodes) - batch.num_decodes)
        if not config.enable_chunked_prefill:
            assert all(s.samples or s.pools for s in batch.sequences), "a prompt was cut although chunks are off"
        assert len({start.row for start in batch.row_starts}) == len(batch.row_starts)
        assert len({update.row for update in batch.block_updates}) == len(batch.block_updates)

    def _apply(self, batch: ScheduledBatch) -> None:
        for start in batch.row_starts:
            self._rows[start.row] = _Row(self._prompts[start.sequence_id], list(start.token_ids))
        for update in batch.block_updates:
            table = self._rows[update.row].block_table
            assert update.first_index <= len(table), "a block table has a gap"
            table[update.first_index : update.first_index + len(update.block_ids)] = update.block_ids

    def _store(self, scheduled: ScheduledSequence, written: set[int]) -> None:
        row = self._rows[scheduled.row]
        assert row.prompt.sequence_id == scheduled.sequence_id
        num_skipped = scheduled.start - row.num_covered
        assert num_skipped >= 0, "a token is computed twice"
        assert num_skipped == 0 or self._config.enable_prefix_caching, "a token is never computed"
        row.num_covered = scheduled.start + scheduled.num_tokens
        for position in range(scheduled.start, row.num_covered):
            slot = self._slot(row, position)
            assert slot not in written, "two sequences write the same slot"
            written.add(slot)
            self._slots[slot] = (position, row.token_ids[position], row.prompt.cache_salt)

    def _attend_decodes(self, decodes: Sequence[ScheduledSequence], written: set[int]) -> list[int | None]:
        """Each stores its token and attends at once, while what the other decodes store is not there yet."""
        sampled, stored = [], {}
        for scheduled in decodes:
            self._store(scheduled, written)
            sampled.append(self._attend(scheduled))
            slot = self._slot(self._rows[scheduled.row], scheduled.start)
            stored[slot], self._slots[slot] = self._slots[slot], None
        for slot, token in stored.items():
            self._slots[slot] = token
        return sampled

    def _attend(self, scheduled: ScheduledSequence) -> int | None:
        row = self._rows[scheduled.row]
        context = row.token_ids[: scheduled.start + scheduled.num_tokens]
        for position, token_id in enumerate(context):
            found = self._slots[self._slot(row, position)]
            assert found == (position, token_id, row.prompt.cache_salt), f"read {found} for {position}, {token_id}"
        is_whole = len(context) == len(row.token_ids)
        assert (scheduled.samples, scheduled.pools) == (
            is_whole and row.prompt.pooling is None,
            is_whole and row.prompt.pooling is not None,
        )
        if not scheduled.samples:
            return None
        token_id = next_token(context, row.prompt)
        row.token_ids.append(token_id)
        return token_id

    def _slot(self, row: _Row, position: int) -> int:
        block_size = self._config.block_size
        return row.block_table[position // block_size] * block_size + position % block_size
