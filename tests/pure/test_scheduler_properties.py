"""Any mix of arrivals, steps, aborts, failures and resizes, at pipeline depths 1 to 3, on pools that are too small.

`tests.fakes.driven_scheduler` says what must hold after each move, and in the end.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.scheduler_config import SchedulerConfig
from tests.fakes.driven_scheduler import DrivenScheduler
from tests.fakes.paged_device import VOCAB_SIZE

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
        num_blocks=draw(st.integers(2, -(-max_model_len // block_size) + 12)),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=is_chunked,
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs(), depth=st.integers(1, 3))
    def create(self, config: SchedulerConfig, depth: int) -> None:
        self.driven = DrivenScheduler(config, depth)

    @rule(
        num_shared=st.integers(0, len(SHARED_PREFIX)),
        own=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=24),
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.sampled_from([(), (0,), (1, 2, 3)]),
        salt=st.sampled_from(["", "", "a salt"]),
        num_samples=st.integers(1, 3),
        is_pooled=st.booleans(),
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
        is_pooled: bool,
    ) -> None:
        token_ids = (*SHARED_PREFIX[:num_shared], *own)
        for _ in range(num_samples):
            self.driven.add(
                token_ids,
                max_tokens,
                min_tokens=min_tokens,
                stop_token_ids=stop_token_ids,
                salt=salt,
                is_pooled=is_pooled,
            )

    @precondition(lambda self: self.driven.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driven.abort(data.draw(st.integers(0, len(self.driven.prompts) - 1)))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driven.step()

    @rule()
    def commit_early(self) -> None:
        self.driven.commit_early()

    @rule(finishes_in_flight=st.booleans())
    def fail_a_step(self, finishes_in_flight: bool) -> None:
        self.driven.fail_a_step(finishes_in_flight=finishes_in_flight)

    @rule(num_blocks=st.integers(0, 60))
    def resize(self, num_blocks: int) -> None:
        self.driven.resize(num_blocks)

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "driven"):
            self.driven.check()

    def teardown(self) -> None:
        if hasattr(self, "driven"):
            self.driven.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=30, derandomize=True, print_blob=False)


@settings(max_examples=150, derandomize=True, print_blob=False)
@given(config=configs(), depth=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_memory_comes_and_goes_under_load(config: SchedulerConfig, depth: int, seed: int) -> None:
    """Somebody is always running: now there is little more than what is in use, now plenty."""
    chance = random.Random(seed)
    driven = DrivenScheduler(config, depth)
    pool = driven.scheduler.block_pool
    for _ in range(80):
        while len(driven.scheduler._sequences) < 4:
            own = tuple(chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(16)))
            driven.add(
                SHARED_PREFIX[: chance.randrange(12)] + own, chance.randint(1, 16), salt=chance.choice(["", "s"])
            )
        for _ in range(chance.randrange(4)):
            driven.step()
        if chance.random() < 0.1:
            driven.abort(chance.choice(list(driven.scheduler._sequences or [0])))
        num_in_use = pool.num_blocks - pool.num_free
        driven.resize(chance.choice([num_in_use - 2, num_in_use, num_in_use + 2, pool.num_blocks + 5, 60]))
        driven.check()
    driven.finish()


def test_resizing_under_load_does_move_blocks_of_running_sequences() -> None:
    """What the test above is about does happen in it."""
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=16, max_model_len=36, block_size=2, num_blocks=30)
    driven = DrivenScheduler(config, depth=2)
    pool = driven.scheduler.block_pool
    for sequence_id in range(6):
        driven.add((sequence_id,), 30)
    for _ in range(12):
        driven.step()
    driven.abort(0)
    driven.resize(0)
    assert driven.num_moved > 0
    assert pool.num_blocks < 30
    driven.check()
    driven.finish()
