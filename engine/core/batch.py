"""`ScheduledBatch` and `SampledTokens`: the two values that pass between scheduler and runner.

Plain frozen integers.  The scheduler builds a batch complete; the runner never edits it.
Rows are persistent slots of per-sequence state on the device: a batch says which rows
start over and which block ids are appended, and everything else is gathered from rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.api.output import TokenLogprobs
from engine.api.request import Pooling
from engine.api.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sequence takes a row: newly admitted, or resumed after preemption.

    `token_ids` are all tokens known so far, prompt first; tokens after `num_prompt_tokens`
    were generated before a preemption.
    """

    row: int
    sequence_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """`block_ids` are written to the row's block table from index `first_index` on."""

    row: int
    first_index: int
    block_ids: tuple[int, ...]


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens [start, start + num_tokens) of the sequence in `row`.

    `samples` is true when the last of them is the sequence's newest token, so that the
    step yields the next one; `pools` when it is the last of a prompt that is pooled, which
    samples nothing.  A msgspec struct, because a step makes hundreds of them and a frozen
    dataclass takes ten times as long to build.
    """

    sequence_id: int
    row: int
    start: int
    num_tokens: int
    samples: bool
    pools: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One engine step; sequences that compute a single token and sample come first (`num_decodes` of them)."""

    step: int
    sequences: tuple[ScheduledSequence, ...]
    num_decodes: int
    row_starts: tuple[RowStart, ...]
    block_updates: tuple[BlockUpdate, ...]
    num_pooled: int = 0
    """How many of the sequences are pooled."""

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per sequence of the batch with `samples`, in batch order.

    `logprobs` is parallel to `token_ids`; None where the request did not ask.  `pooled` has float32 numbers for each
    sequence with `pools`, in batch order; none where they are beyond what the model's number format holds.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    pooled: tuple[bytes, ...] = ()
