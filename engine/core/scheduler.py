"""`Scheduler`: picks, step by step, which tokens of which sequences to compute.

A step has `max_num_batched_tokens` to hand out.  Running sequences one token behind (decodes) come
first, then new ones are admitted in order of arrival, then what is left goes to longer prefills,
which continue in later steps.  When a decode needs a block and none is free, the most recent arrival
is preempted: it loses its blocks and row, keeps its tokens, and later computes them again.

Steps may overlap: `schedule` can be called again before `commit` has told it the tokens of earlier
steps, whose number it knows (`Sequence.num_pending_tokens`) and whose ids the device keeps.  `commit`
copes with sequences that have ended or been preempted in the meantime.

Driven by `engine.loop`; knows integers only, no tensors and no text.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from engine.api.errors import ContextLengthExceeded, InvalidParameter
from engine.api.output import POOLED_OVERFLOW, FinishReason, StepOutput, TokenLogprobs
from engine.api.request import Prompt
from engine.api.wire import EngineStats
from engine.core.batch import SampledTokens, ScheduledBatch
from engine.core.batch_builder import BatchBuilder
from engine.core.block_pool import BlockPool
from engine.core.prefix_cache import PrefixCache
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import NO_ROW, Sequence
from engine.core.waiting_queue import WaitingQueue, by_arrival


@dataclass(slots=True)
class _Counters:
    """Totals since the start, or since `Scheduler.reset_stats`."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


class Scheduler:
    """Owns the sequences of one engine, their blocks and their rows; not thread-safe."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.block_pool = BlockPool(config.num_blocks, config.block_size)
        self._prefix_cache = PrefixCache(self.block_pool, is_enabled=config.enable_prefix_caching)
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        # Never more sequences than tokens in a step, so that each decode gets one and a prefill at least one.
        num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._free_rows = list(reversed(range(num_rows)))
        self._num_arrivals = 0
        self._num_steps = 0
        self._counters = _Counters()
        # Sequences whose blocks got other ids since the last step, and the first index that differs.
        self._moved: dict[Sequence, int] = {}

    @property
    def max_model_len(self) -> int:
        """The longest context in force: never more than the blocks hold, so that a sequence alone always ends."""
        return min(self.config.max_model_len, self.block_pool.num_blocks * self.config.block_size)

    @property
    def least_blocks(self) -> int:
        """What the largest open sequence may come to need, and room for a prompt and an output token in any case."""
        least_tokens = max((sequence.max_total_tokens for sequence in self._sequences.values()), default=2)
        return -(-max(2, least_tokens) // self.config.block_size)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended yet."""
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def stats(self) -> EngineStats:
        counters = self._counters
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self.block_pool.num_free,
            num_blocks=self.block_pool.num_blocks,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            prefix_query_tokens_total=counters.prefix_query_tokens,
            prefix_hit_tokens_total=counters.prefix_hit_tokens,
            preemptions_total=counters.preemptions,
            steps_total=counters.steps,
        )

    def reset_stats(self) -> None:
        """Count from zero again, as after a warm-up."""
        self._counters = _Counters()

    def add(self, prompt: Prompt) -> None:
        """Queue a sequence.

        Raises `ContextLengthExceeded` when no output token could follow the prompt, and `InvalidParameter`
        for an empty prompt, a `max_tokens` below 1 or a `sequence_id` already in use.  A prompt that is pooled needs
        no room for an output.
        """
        if not prompt.token_ids:
            raise InvalidParameter("prompt", "The prompt has no tokens; send at least one.")
        least_tokens = len(prompt.token_ids) + (prompt.pooling is None)
        if least_tokens > self.max_model_len:
            raise ContextLengthExceeded(least_tokens, self.max_model_len, param="prompt")
        if prompt.max_tokens < 1 and prompt.pooling is None:
            raise InvalidParameter("max_tokens", f"max_tokens must be at least 1, not {prompt.max_tokens}.")
        if prompt.sequence_id in self._sequences:
            raise InvalidParameter("sequence_id", f"Sequence {prompt.sequence_id} is still running; use a new id.")
        sequence = Sequence(prompt, arrival=self._num_arrivals, max_model_len=self.max_model_len)
        self._num_arrivals += 1
        self._sequences[prompt.sequence_id] = sequence
        self._waiting.push(sequence)

    def abort(self, sequence_id: int) -> StepOutput | None:
        """End a sequence now and free its row and blocks; None if the id is not known (any more).

        Tokens that steps in flight still sample for it are dropped when they are committed.
        """
        sequence = self._sequences.get(sequence_id)
        return None if sequence is None else self._end_early(sequence, "abort")

    def abort_all(self, message: str) -> list[StepOutput]:
        """End every sequence with finish reason "error", after a step has failed.

        Clears the prefix cache: it may offer blocks that the failed step was to compute.
        """
        outputs = [self._end_early(sequence, "error", message) for sequence in list(self._sequences.values())]
        self._prefix_cache.clear()
        return outputs

    def resize(self, num_blocks: int) -> list[tuple[int, int]]:
        """Have `num_blocks`, or as near as open sequences allow; returns which blocks' contents move where.

        The latest arrivals are preempted while those in use do not fit; `least_blocks` remain in any case.  The
        contents must be moved before the next batch is launched, which has the new ids.
        """
        pool = self.block_pool
        num_blocks = max(num_blocks, self.least_blocks)
        while pool.num_blocks - pool.num_free > num_blocks:
            self._preempt(self._running[-1])
        moves = pool.resize(num_blocks)
        new_ids = dict(moves)
        for sequence in self._running if moves else ():
            first_index = sequence.rename_blocks(new_ids)
            if first_index is not None:
                self._moved[sequence] = min(first_index, self._moved.get(sequence, first_index))
        return moves

    def forget_prefixes(self) -> None:
        """Let nothing be found in the prefix cache any more; for caches that lose their content."""
        self._prefix_cache.clear()

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step; None when nothing can be computed before an earlier step is committed.

        The batch must be launched, in the order of the calls: state already counts it as computed.
        """
        builder = BatchBuilder()
        num_preemptions = self._counters.preemptions
        prefilling = self._schedule_decodes(builder)
        num_left = self.config.max_num_batched_tokens - builder.num_decodes
        # Blocks that a preemption has just freed are for those who run.
        if num_left > 0 and len(self._waiting) and self._counters.preemptions == num_preemptions:
            prefilling += self._admit(builder)
            prefilling.sort(key=by_arrival)
        if num_left > 0 and prefilling:
            self._schedule_prefills(prefilling, num_left, builder)
        if builder.is_empty:
            return None
        for sequence, first_index in self._moved.items():
            builder.table_changed(sequence, first_index)
        self._moved.clear()
        self._num_steps += 1
        self._counters.steps += 1
        return builder.build(self._num_steps - 1)

    def commit(self, batch: ScheduledBatch, sampled: SampledTokens) -> list[StepOutput]:
        """Take in the tokens of a step; one output for each of its sequences that still lives.

        Batches are committed in the order they were scheduled.
        """
        outputs = []
        sequences = self._sequences
        tokens = zip(sampled.token_ids, sampled.logprobs, strict=True)
        for scheduled in batch.sequences:
            if scheduled.samples:
                token_id, logprobs = next(tokens)
                sequence = sequences.get(scheduled.sequence_id)
                if sequence is not None:
                    outputs.append(self._append(sequence, token_id, logprobs))
        self._counters.generation_tokens += len(outputs)
        return outputs + self._end_pooled(batch, sampled) if batch.num_pooled else outputs

    def _end_pooled(self, batch: ScheduledBatch, sampled: SampledTokens) -> list[StepOutput]:
        """The outputs of pooled sequences; one that was preempted meanwhile need not start again."""
        outputs = []
        pooled = (scheduled for scheduled in batch.sequences if scheduled.pools)
        for scheduled, numbers in zip(pooled, sampled.pooled, strict=True):
            sequence = self._sequences.get(scheduled.sequence_id)
            if sequence is None:
                continue
            self._count_prompt(sequence)
            if numbers:
                self._end(sequence)
                num_cached = sequence.num_cached_tokens
                outputs.append(StepOutput(sequence.sequence_id, (), "stop", None, num_cached, pooled=numbers))
            else:
                outputs.append(self._end_early(sequence, "error", POOLED_OVERFLOW))
        return outputs

    def _schedule_decodes(self, builder: BatchBuilder) -> list[Sequence]:
        """Give one token to every sequence that is one behind; returns those that are further behind."""
        block_size = self.config.block_size
        num_left = self.config.max_num_batched_tokens - self._num_tokens_reserved()
        further_behind = []
        # A preemption removes from the end of this list, never at or before the current place but to stop here.
        for sequence in self._running:
            num_computed = sequence.num_computed_tokens
            num_behind = sequence.num_tokens - num_computed
            if num_behind > 1 or (sequence.is_pooled and num_behind):
                further_behind.append(sequence)
            elif num_left > 0 and sequence.num_tokens < sequence.max_total_tokens:
                has_block = num_computed < len(sequence.block_table) * block_size
                if has_block or self._grow(sequence, builder):
                    builder.compute(sequence, 1)
                    num_left -= 1
        return further_behind

    def _num_tokens_reserved(self) -> int:
        """Without chunks the oldest prefill needs room for all of its tokens in one step: decodes leave it."""
        if self.config.enable_chunked_prefill:
            return 0
        return next((s.num_uncomputed_tokens for s in self._running if s.num_uncomputed_tokens > 1), 0)

    def _schedule_prefills(self, prefilling: list[Sequence], num_left: int, builder: BatchBuilder) -> None:
        """Share `num_left` tokens: half is kept for the oldest, the others go shortest first, it takes the rest.

        So a long prompt does not hold back a short one, and each becomes the oldest in the end.  Being last,
        the oldest also skips what the others have just computed of a common prefix.
        """
        oldest = prefilling[0]
        num_wanted = oldest.num_uncomputed_tokens
        if self.config.enable_chunked_prefill:
            num_kept = min(num_wanted, (num_left + 1) // 2)
        else:
            num_kept = num_wanted if num_wanted <= num_left else 0
        num_left -= num_kept
        for sequence in sorted(prefilling[1:], key=lambda other: other.num_uncomputed_tokens):
            num_computed, is_whole = self._schedule_chunk(sequence, num_left, builder)
            num_left -= num_computed
            if not is_whole:
                break
        self._schedule_chunk(oldest, num_left + num_kept, builder)

    def _schedule_chunk(self, sequence: Sequence, limit: int, builder: BatchBuilder) -> tuple[int, bool]:
        """Compute up to `limit` tokens; returns how many, and whether they were all that was missing.

        A chunk ends at a block boundary where it can, so that the next one may begin with cached blocks.
        """
        if limit == 0:
            return 0, False
        first_index = sequence.num_computed_tokens // self.config.block_size
        if self._prefix_cache.adopt(sequence):
            builder.table_changed(sequence, first_index)
        num_tokens = sequence.num_uncomputed_tokens
        is_whole = num_tokens <= limit
        if not is_whole:
            if not self.config.enable_chunked_prefill:
                return 0, False
            num_beyond_boundary = (sequence.num_computed_tokens + limit) % self.config.block_size
            num_tokens = limit - num_beyond_boundary if num_beyond_boundary < limit else limit
        builder.compute(sequence, num_tokens)
        if num_tokens > 1:  # what a decode stores cannot be read in the same step; its commit offers it
            self._prefix_cache.offer(sequence)
        return num_tokens, is_whole

    def _admit(self, builder: BatchBuilder) -> list[Sequence]:
        def try_start(sequence: Sequence) -> bool:
            return self._try_start(sequence, builder)

        return self._waiting.admit(len(self._free_rows), try_start)

    def _try_start(self, sequence: Sequence, builder: BatchBuilder) -> bool:
        """Give a waiting sequence a row and blocks for all its known tokens, if they are there.

        One free block per running sequence must remain: each can then fill another block before anyone is
        preempted, and a fresh start is not undone at once.
        """
        if sequence.num_pending_tokens:
            return False
        pool = self.block_pool
        cached = self._prefix_cache.find(sequence)
        num_new = -(-len(sequence.token_ids) // pool.block_size) - len(cached)
        if num_new + pool.count_free(cached) + len(self._running) > pool.num_free:
            return False
        for block_id in cached:
            pool.share(block_id)
        sequence.block_table = cached + pool.allocate(num_new)
        sequence.num_hashed_blocks = len(cached)
        self._prefix_cache.advance(sequence, len(cached))
        sequence.row = self._free_rows.pop()
        insort(self._running, sequence, key=by_arrival)
        builder.start(sequence)
        return True

    def _grow(self, sequence: Sequence, builder: BatchBuilder) -> bool:
        """Add a block for the next token; false when it was this sequence that had to give way."""
        while self.block_pool.num_free == 0:
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        builder.table_changed(sequence, len(sequence.block_table))
        sequence.block_table += self.block_pool.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue without row and blocks; known and pending tokens stay."""
        self._release(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        if sequence.num_output_tokens == 0:
            sequence.num_cached_tokens = 0
        self._waiting.push(sequence)
        self._counters.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._moved.pop(sequence, None)
        self.block_pool.free(sequence.block_table)
        sequence.block_table = []
        self._free_rows.append(sequence.row)
        sequence.row = NO_ROW

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> StepOutput:
        """Take in one token, which may end the sequence; it may have been preempted since the token was scheduled."""
        is_first = sequence.num_output_tokens == 0
        sequence.token_ids.append(token_id)
        self._prefix_cache.offer(sequence)
        if is_first:
            self._count_prompt(sequence)
        finish_reason, stop_token_id = sequence.finish_reason(token_id)
        if finish_reason is not None:
            self._end(sequence)
        return StepOutput(
            sequence.sequence_id,
            (token_id,),
            finish_reason,
            stop_token_id,
            sequence.num_cached_tokens if is_first else 0,
            () if logprobs is None else (logprobs,),
        )

    def _count_prompt(self, sequence: Sequence) -> None:
        counters = self._counters
        counters.prompt_tokens += sequence.num_prompt_tokens
        if self.config.enable_prefix_caching:
            counters.prefix_query_tokens += sequence.num_prompt_tokens
            counters.prefix_hit_tokens += sequence.num_cached_tokens

    def _end_early(self, sequence: Sequence, reason: FinishReason, message: str | None = None) -> StepOutput:
        self._end(sequence)
        return StepOutput(
            sequence.sequence_id,
            finish_reason=reason,
            num_cached_tokens=0 if sequence.num_output_tokens else sequence.num_cached_tokens,
            error_message=message,
        )

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.sequence_id]
        if sequence.is_running:
            self._release(sequence)
        else:
            self._waiting.remove(sequence)
