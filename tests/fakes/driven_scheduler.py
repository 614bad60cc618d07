"""A scheduler driven as `engine.loop` does, on a device that checks every read of its KV cache.

After any mix of arrivals, steps, aborts, failures and resizes, `check` compares the pool with the block tables and
the queues with the sequences; `finish` runs everything to its end, in a bounded number of steps, and compares each
sequence with what it generates alone.
"""

from __future__ import annotations

from collections import Counter, deque

from engine.api.output import StepOutput
from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from engine.core.batch import SampledTokens, ScheduledBatch
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from tests.fakes.paged_device import PagedDevice, generate_alone, pool


class DrivenScheduler:
    """`depth` steps may be in flight before the oldest is committed."""

    def __init__(self, config: SchedulerConfig, depth: int) -> None:
        self.scheduler = Scheduler(config)
        self.prompts: dict[int, Prompt] = {}
        self.num_moved = 0
        self._depth = depth
        self._device = PagedDevice(config, self.prompts)
        self._in_flight: deque[tuple[ScheduledBatch, SampledTokens]] = deque()
        self._outputs: dict[int, list[int]] = {}
        self._finish_reasons: dict[int, str] = {}
        self._max_model_lens: dict[int, int] = {}
        self._num_steps = 0

    def add(
        self,
        token_ids: tuple[int, ...],
        max_tokens: int,
        *,
        min_tokens: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        salt: str = "",
        is_pooled: bool = False,
    ) -> None:
        """Queue a prompt of these tokens, as many of them as the context in force has room for."""
        fitting = token_ids[: self.scheduler.max_model_len - (not is_pooled)] or (0,)
        sampling = SamplingParams(min_tokens=min(min_tokens, max_tokens))
        pooling = Pooling("embed") if is_pooled else None
        prompt = Prompt(len(self.prompts), fitting, max_tokens, sampling, stop_token_ids, salt, pooling)
        self.prompts[prompt.sequence_id] = prompt
        self._outputs[prompt.sequence_id] = []
        self._max_model_lens[prompt.sequence_id] = self.scheduler.max_model_len
        self.scheduler.add(prompt)

    def abort(self, sequence_id: int) -> None:
        output = self.scheduler.abort(sequence_id)
        assert (output is None) == (sequence_id in self._finish_reasons)
        if output is not None:
            assert output.finish_reason == "abort"
            self._take(output)

    def step(self) -> None:
        self._num_steps += 1
        batch = self.scheduler.schedule()
        if batch is not None:
            self._in_flight.append((batch, self._device.launch(batch)))
            if len(self._in_flight) < self._depth:
                return
        if self._in_flight:
            self._commit()
        else:
            assert not self.scheduler.has_work, "nothing is in flight and nothing is scheduled"

    def commit_early(self) -> None:
        if self._in_flight:
            self._commit()

    def fail_a_step(self, *, finishes_in_flight: bool) -> None:
        """A batch is scheduled but never runs; steps before it may or may not be committed afterwards."""
        self.scheduler.schedule()
        for output in self.scheduler.abort_all("the device is on fire"):
            assert (output.finish_reason, output.error_message) == ("error", "the device is on fire")
            self._take(output)
        while self._in_flight and finishes_in_flight:
            self._commit()
        self._in_flight.clear()
        assert not self.scheduler.has_work
        assert self.scheduler.block_pool.num_cached == 0

    def resize(self, num_blocks: int) -> None:
        """The cache gets as near as open sequences allow: each must fit alone."""
        scheduler = self.scheduler
        pool, config = scheduler.block_pool, scheduler.config
        needed = [2, *(sequence.max_total_tokens for sequence in scheduler._sequences.values())]
        alive, num_cached = set(scheduler._sequences), pool.num_cached
        moves = scheduler.resize(num_blocks)
        assert pool.num_blocks == max(num_blocks, -(-max(needed) // config.block_size))
        assert scheduler.max_model_len == min(config.max_model_len, pool.num_blocks * config.block_size)
        assert set(scheduler._sequences) == alive
        assert pool.num_cached <= num_cached
        self.num_moved += len(scheduler._moved)
        self._device.resize(pool.num_blocks, moves)

    def check(self) -> None:
        self._check_pool()
        self._check_queues()

    def finish(self) -> None:
        alive = self.scheduler._sequences.values()
        max_steps = self._num_steps + 50 + 4 * sum(sequence.max_total_tokens for sequence in alive)
        while self.scheduler.has_work or self._in_flight:
            self.step()
            assert self._num_steps <= max_steps, "somebody starves"
        self._check_pool()
        pool = self.scheduler.block_pool
        assert pool.num_free == pool.num_blocks
        assert self._finish_reasons.keys() == self.prompts.keys()
        for sequence_id, prompt in self.prompts.items():
            if prompt.pooling is not None:
                continue
            expected, reason = generate_alone(prompt, self._max_model_lens[sequence_id])
            got = self._outputs[sequence_id]
            assert got == expected[: len(got)]
            if self._finish_reasons[sequence_id] not in ("abort", "error"):
                assert (got, self._finish_reasons[sequence_id]) == (expected, reason)

    def _check_pool(self) -> None:
        scheduler = self.scheduler
        pool = scheduler.block_pool
        pool.check_integrity()
        holders = Counter(block_id for sequence in scheduler._running for block_id in sequence.block_table)
        assert all(pool.ref_count(block_id) == holders[block_id] for block_id in range(pool.num_blocks))
        if not scheduler.config.enable_prefix_caching:
            assert all(count == 1 for count in holders.values())
        for sequence in scheduler._running:
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            # What is not computed yet is the sequence's own.
            num_computed_blocks = sequence.num_computed_tokens // pool.block_size
            assert all(holders[block_id] == 1 for block_id in sequence.block_table[num_computed_blocks + 1 :])

    def _check_queues(self) -> None:
        scheduler = self.scheduler
        rows = [sequence.row for sequence in scheduler._running]
        assert sorted(rows + scheduler._free_rows) == list(range(len(rows) + len(scheduler._free_rows)))
        for queue in (scheduler._running, list(scheduler._waiting)):
            assert [s.arrival for s in queue] == sorted(s.arrival for s in queue)
        assert all(not s.block_table and not s.is_running for s in scheduler._waiting)
        alive = {s.sequence_id for s in (*scheduler._running, *scheduler._waiting)}
        assert alive == self.prompts.keys() - self._finish_reasons.keys() == scheduler._sequences.keys()
        for sequence in scheduler._sequences.values():
            assert sequence.num_tokens <= sequence.max_total_tokens
            assert 0 <= sequence.num_pending_tokens <= len(self._in_flight)

    def _commit(self) -> None:
        batch, sampled = self._in_flight.popleft()
        outputs = self.scheduler.commit(batch, sampled)
        assert len({output.sequence_id for output in outputs}) == len(outputs)
        for output in outputs:
            is_pooled = self.prompts[output.sequence_id].pooling is not None
            assert len(output.token_ids) == (0 if is_pooled else 1)
            if is_pooled:
                assert output.finish_reason == "stop"
                assert output.pooled == pool(self.prompts[output.sequence_id].token_ids)
            self._take(output)

    def _take(self, output: StepOutput) -> None:
        sequence_id = output.sequence_id
        assert sequence_id not in self._finish_reasons, "an output follows the terminal one"
        prompt, is_first = self.prompts[sequence_id], not self._outputs[sequence_id]
        assert 0 <= output.num_cached_tokens < len(prompt.token_ids) if is_first else output.num_cached_tokens == 0
        self._outputs[sequence_id] += output.token_ids
        if output.finish_reason is not None:
            self._finish_reasons[sequence_id] = output.finish_reason
            if output.finish_reason == "stop" and prompt.pooling is None:
                assert output.stop_token_id == output.token_ids[-1]
