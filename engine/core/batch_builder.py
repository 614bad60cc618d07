"""`BatchBuilder`: collects what one call of `Scheduler.schedule` decides into a `ScheduledBatch`.

It puts single-token sampling sequences first and sends each row's block table at most once per step,
however often it changed meanwhile.  Knows no policy.
"""

from __future__ import annotations

from engine.core.batch import BlockUpdate, RowStart, ScheduledBatch, ScheduledSequence
from engine.core.sequence import Sequence


class BatchBuilder:
    """One step in the making; thrown away once built."""

    __slots__ = ("_chunks", "_decodes", "_first_changed", "_num_pooled", "_row_starts")

    def __init__(self) -> None:
        self._decodes: list[ScheduledSequence] = []
        self._chunks: list[ScheduledSequence] = []
        self._num_pooled = 0
        self._row_starts: list[RowStart] = []
        self._first_changed: dict[Sequence, int] = {}

    @property
    def num_decodes(self) -> int:
        return len(self._decodes)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be computed; then nothing must have changed either."""
        is_empty = not self._decodes and not self._chunks
        assert not (is_empty and self._first_changed), "a row changed in a step that computes nothing"
        return is_empty

    def start(self, sequence: Sequence) -> None:
        """The sequence takes its row anew, with all tokens known so far and its whole block table."""
        prompt = sequence.prompt
        self._row_starts.append(
            RowStart(
                row=sequence.row,
                sequence_id=sequence.sequence_id,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=prompt.sampling,
                stop_token_ids=prompt.stop_token_ids,
                pooling=prompt.pooling,
            )
        )
        self._first_changed[sequence] = 0

    def table_changed(self, sequence: Sequence, first_index: int) -> None:
        """The sequence's block table differs from `first_index` on from what its row holds."""
        self._first_changed[sequence] = min(first_index, self._first_changed.get(sequence, first_index))

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """Compute the next `num_tokens` of the sequence; when none are left after them, sample one more, or pool."""
        start = sequence.num_computed_tokens
        end = sequence.num_computed_tokens = start + num_tokens
        if end < sequence.num_tokens:
            self._chunks.append(ScheduledSequence(sequence.sequence_id, sequence.row, start, num_tokens, False))
            return
        if sequence.is_pooled:
            self._chunks.append(ScheduledSequence(sequence.sequence_id, sequence.row, start, num_tokens, False, True))
            self._num_pooled += 1
            return
        sequence.num_tokens = end + 1
        single_or_chunk = self._decodes if num_tokens == 1 else self._chunks
        single_or_chunk.append(ScheduledSequence(sequence.sequence_id, sequence.row, start, num_tokens, True))

    def build(self, step: int) -> ScheduledBatch:
        """The finished batch; something is to be computed."""
        return ScheduledBatch(
            step=step,
            sequences=(*self._decodes, *self._chunks),
            num_decodes=len(self._decodes),
            row_starts=tuple(self._row_starts),
            block_updates=tuple(
                BlockUpdate(sequence.row, first_index, tuple(sequence.block_table[first_index:]))
                for sequence, first_index in self._first_changed.items()
            ),
            num_pooled=self._num_pooled,
        )
