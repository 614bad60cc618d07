"""Any mix of arrivals, steps, aborts and failures, at pipeline depths 1 to 3, on pools that are too small.

The device is a fake that checks every read of the KV cache.  After each move the pool must agree with
the block tables; in the end every sequence has ended exactly once with the tokens it has alone, within
a bounded number of steps, and the pool is whole.
"""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.api.output import StepOutput
from engine.api.request import Prompt
from engine.api.sampling import SamplingParams
from engine.core.batch import SampledTokens, ScheduledBatch
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from tests.fakes.paged_device import VOCAB_SIZE, PagedDevice, generate_alone

SHARED_PREFIX = tuple(token_id % VOCAB_SIZE for token_id in range(3, 60, 5))


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    block_size = draw(st.integers(1, 4))
    max_model_len = draw(st.integers(3, 36))
    is_chunked = draw(st.booleans())
    return SchedulerConfig(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 24)) + (0 if is_chunked else max_model_len),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=-(-max_model_len // block_size) + draw(st.integers(0, 12)),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=is_chunked,
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler as `engine.loop` does."""

    @initialize(config=configs(), depth=st.integers(1, 3))
    def create(self, config: SchedulerConfig, depth: int) -> None:
        self.depth = depth
        self.scheduler = Scheduler(config)
        self.prompts: dict[int, Prompt] = {}
        self.device = PagedDevice(config, self.prompts)
        self.in_flight: deque[tuple[ScheduledBatch, SampledTokens]] = deque()
        self.outputs: dict[int, list[int]] = {}
        self.finish_reasons: dict[int, str] = {}
        self.num_steps = 0

    @rule(
        num_shared=st.integers(0, len(SHARED_PREFIX)),
        own=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=24),
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.sampled_from([(), (0,), (1, 2, 3)]),
        salt=st.sampled_from(["", "", "a salt"]),
        num_samples=st.integers(1, 3),
    )
    def add(
        self,
        num_shared: int,
        own: list[int],
        max_tokens: int,
        min_tokens: int,
        stop_token_ids: tuple[int, ...],
        salt: str,
        num_samples: int,
    ) -> None:
        token_ids = (*SHARED_PREFIX[:num_shared], *own)[: self.scheduler.config.max_model_len - 1] or (0,)
        sampling = SamplingParams(min_tokens=min(min_tokens, max_tokens))
        for _ in range(num_samples):
            prompt = Prompt(len(self.prompts), token_ids, max_tokens, sampling, stop_token_ids, salt)
            self.prompts[prompt.sequence_id] = prompt
            self.outputs[prompt.sequence_id] = []
            self.scheduler.add(prompt)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.integers(0, len(self.prompts) - 1))
        output = self.scheduler.abort(sequence_id)
        assert (output is None) == (sequence_id in self.finish_reasons)
        if output is not None:
            assert output.finish_reason == "abort"
            self._take(output)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule()
    def commit_early(self) -> None:
        if self.in_flight:
            self._commit()

    @rule(finishes_in_flight=st.booleans())
    def fail_a_step(self, finishes_in_flight: bool) -> None:
        """A batch is scheduled but never runs; steps before it may or may not be committed afterwards."""
        self.scheduler.schedule()
        for output in self.scheduler.abort_all("the device is on fire"):
            assert (output.finish_reason, output.error_message) == ("error", "the device is on fire")
            self._take(output)
        while self.in_flight and finishes_in_flight:
            self._commit()
        self.in_flight.clear()
        assert not self.scheduler.has_work
        assert self.scheduler.block_pool.num_cached == 0

    @invariant()
    def pool_agrees_with_the_block_tables(self) -> None:
        if not hasattr(self, "scheduler"):
            return
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

    @invariant()
    def rows_and_queues_are_consistent(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        rows = [sequence.row for sequence in scheduler._running]
        assert sorted(rows + scheduler._free_rows) == list(range(len(rows) + len(scheduler._free_rows)))
        for queue in (scheduler._running, list(scheduler._waiting)):
            assert [s.arrival for s in queue] == sorted(s.arrival for s in queue)
        assert all(not s.block_table and not s.is_running for s in scheduler._waiting)
        alive = {s.sequence_id for s in (*scheduler._running, *scheduler._waiting)}
        assert alive == self.prompts.keys() - self.finish_reasons.keys() == scheduler._sequences.keys()
        for sequence in scheduler._sequences.values():
            assert sequence.num_tokens <= sequence.max_total_tokens
            assert 0 <= sequence.num_pending_tokens <= len(self.in_flight)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        alive = self.scheduler._sequences.values()
        self._drain(max_steps=50 + 4 * sum(sequence.max_total_tokens for sequence in alive))
        self.pool_agrees_with_the_block_tables()
        pool = self.scheduler.block_pool
        assert pool.num_free == pool.num_blocks
        assert self.finish_reasons.keys() == self.prompts.keys()
        for sequence_id, prompt in self.prompts.items():
            expected, reason = generate_alone(prompt, self.scheduler.config.max_model_len)
            got = self.outputs[sequence_id]
            assert got == expected[: len(got)]
            if self.finish_reasons[sequence_id] not in ("abort", "error"):
                assert (got, self.finish_reasons[sequence_id]) == (expected, reason)

    def _drain(self, max_steps: int) -> None:
        first_step = self.num_steps
        while self.scheduler.has_work or self.in_flight:
            self._step()
            assert self.num_steps - first_step <= max_steps, "somebody starves"

    def _step(self) -> None:
        self.num_steps += 1
        batch = self.scheduler.schedule()
        if batch is not None:
            self.in_flight.append((batch, self.device.launch(batch)))
            if len(self.in_flight) < self.depth:
                return
        if self.in_flight:
            self._commit()
        else:
            assert not self.scheduler.has_work, "nothing is in flight and nothing is scheduled"

    def _commit(self) -> None:
        batch, sampled = self.in_flight.popleft()
        outputs = self.scheduler.commit(batch, sampled)
        assert len({output.sequence_id for output in outputs}) == len(outputs)
        for output in outputs:
            assert len(output.token_ids) == 1
            self._take(output)

    def _take(self, output: StepOutput) -> None:
        sequence_id = output.sequence_id
        assert sequence_id not in self.finish_reasons, "an output follows the terminal one"
        prompt, is_first = self.prompts[sequence_id], not self.outputs[sequence_id]
        assert 0 <= output.num_cached_tokens < len(prompt.token_ids) if is_first else output.num_cached_tokens == 0
        self.outputs[sequence_id] += output.token_ids
        if output.finish_reason is not None:
            self.finish_reasons[sequence_id] = output.finish_reason
            if output.finish_reason == "stop":
                assert output.stop_token_id == output.token_ids[-1]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True, print_blob=False
)
