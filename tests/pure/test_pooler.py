"""How a request's prompts go to the worker: in windows, in order, and none stays there."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.metrics import Metrics
from app.pooling import Pooler, cosine
from app.residency.workers.step_mailbox import StepMailbox
from app.residency.workers.worker_client import WorkerClient
from app.usage_recorder import UsageRecorder
from engine.api.errors import EngineError, WorkerDied
from engine.api.output import StepOutput
from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from engine.text.pooling_stage import PoolingStage
from store.database import DatabaseThread

MOST_OPEN_TOKENS = 8192


class Stage:
    max_tokens = 10_000


class Worker:
    """Answers the prompts that it holds with their lengths: some at a time by `chance`, or the oldest."""

    def __init__(self, chance: Random | None = None, fails: StepOutput | None = None) -> None:
        self.open: dict[int, Prompt] = {}
        self.most_open_tokens = 0
        self.aborted: list[int] = []
        self.failure: EngineError | None = None
        self._chance = chance
        self._fails = fails

    def submit(self, prompts: Sequence[Prompt], mailbox: StepMailbox) -> None:
        self.open.update((prompt.sequence_id, prompt) for prompt in prompts)
        self.most_open_tokens = max(self.most_open_tokens, sum(len(one.token_ids) for one in self.open.values()))
        asyncio.get_running_loop().call_soon(self._answer, mailbox)

    def _answer(self, mailbox: StepMailbox) -> None:
        if not self.open:
            return
        answered = [next(iter(self.open))]
        if self._chance is not None:
            answered = self._chance.sample(sorted(self.open), self._chance.randint(1, len(self.open)))
        for sequence_id in answered:
            values = array("f", [len(self.open.pop(sequence_id).token_ids)])
            mailbox.put(self._fails or StepOutput(sequence_id, finish_reason="stop", pooled=values.tobytes()))
        asyncio.get_running_loop().call_soon(self._answer, mailbox)

    def abort(self, sequence_ids: Sequence[int]) -> None:
        self.aborted += list(sequence_ids)


def prompts(lengths: Sequence[int]) -> list[Prompt]:
    return [
        Prompt(number, (1,) * length, 0, SamplingParams(), pooling=Pooling("embed"))
        for number, length in enumerate(lengths)
    ]


def pooler(worker: Any) -> Pooler:
    usage = UsageRecorder(cast(DatabaseThread, None))
    return Pooler("m", cast(PoolingStage, Stage()), cast(WorkerClient, worker), Metrics(), usage, "cpu")


@given(st.lists(st.integers(1, 5000), max_size=12), st.integers())
def test_windows_keep_the_order_and_the_bound(lengths: list[int], seed: int) -> None:
    worker = Worker(Random(seed))

    pooled = asyncio.run(pooler(worker).run(prompts(lengths)))

    assert [array("f", one.values)[0] for one in pooled] == lengths
    assert [one.num_tokens for one in pooled] == lengths
    assert worker.most_open_tokens <= MOST_OPEN_TOKENS
    assert worker.open == {}


def test_a_prompt_above_the_window_goes_alone() -> None:
    worker = Worker()

    pooled = asyncio.run(pooler(worker).run(prompts([3, MOST_OPEN_TOKENS + 1, 3])))

    assert [one.num_tokens for one in pooled] == [3, MOST_OPEN_TOKENS + 1, 3]
    assert worker.most_open_tokens == MOST_OPEN_TOKENS + 1


def test_a_failure_aborts_the_rest() -> None:
    worker = Worker(fails=StepOutput(0, finish_reason="error", error_message="Out of memory."))

    with pytest.raises(EngineError, match=r"Out of memory\."):
        asyncio.run(pooler(worker).run(prompts([3, 4, 5])))
    assert worker.aborted == [1, 2]


def test_the_workers_own_failure_is_told() -> None:
    worker = Worker(fails=StepOutput(0, finish_reason="error"))
    worker.failure = WorkerDied("It died.")

    with pytest.raises(WorkerDied):
        asyncio.run(pooler(worker).run(prompts([3])))


def test_a_caller_who_leaves_aborts_everything() -> None:
    class Silent(Worker):
        def submit(self, prompts: Sequence[Prompt], mailbox: StepMailbox) -> None:
            self.open.update((prompt.sequence_id, prompt) for prompt in prompts)

    worker = Silent()

    async def leave() -> None:
        async with asyncio.timeout(0.01):
            await pooler(worker).run(prompts([3, 4]))

    with pytest.raises(TimeoutError):
        asyncio.run(leave())
    assert worker.aborted == [0, 1]


def test_cosines() -> None:
    assert cosine([3.0, 4.0], [6.0, 8.0]) == pytest.approx(1.0)
    assert cosine([1.0, 0.0], [0.0, 2.0]) == 0.0
    assert cosine([0.0, 0.0], [1.0, 2.0]) == 0.0
