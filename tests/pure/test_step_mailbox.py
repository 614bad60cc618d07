"""What waits for a stream is taken together, and nothing of it is lost or reordered."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.residency.workers.step_mailbox import StepMailbox, merge_steps
from engine.api.output import StepOutput, TokenLogprobs


async def test_a_reader_that_keeps_up_gets_every_output_at_once() -> None:
    mailbox = StepMailbox()
    for token_id in (5, 6):
        reading = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(StepOutput(1, (token_id,)))
        assert await reading == [StepOutput(1, (token_id,))]


async def test_a_reader_that_falls_behind_gets_several_steps_as_one() -> None:
    mailbox = StepMailbox()
    mailbox.put(StepOutput(1, (5,), num_cached_tokens=16, logprobs=(TokenLogprobs(-0.5),)))
    mailbox.put(StepOutput(2, (9,)))
    mailbox.put(StepOutput(1, (6, 7), "stop", 7, logprobs=(TokenLogprobs(-1.0), TokenLogprobs(-1.5))))
    logprobs = (TokenLogprobs(-0.5), TokenLogprobs(-1.0), TokenLogprobs(-1.5))
    assert await mailbox.take() == [
        StepOutput(1, (5, 6, 7), "stop", 7, num_cached_tokens=16, logprobs=logprobs),
        StepOutput(2, (9,)),
    ]


async def test_a_reader_that_was_cancelled_loses_nothing() -> None:
    mailbox = StepMailbox()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(mailbox.take(), 0.01)
    mailbox.put(StepOutput(1, (5,)))
    assert await mailbox.take() == [StepOutput(1, (5,))]


def test_a_failure_comes_after_the_tokens_before_it() -> None:
    failure = StepOutput(1, finish_reason="error", error_message="gone")
    outputs = [StepOutput(1, (5,)), failure, StepOutput(2, (6,))]
    assert merge_steps(outputs) == [StepOutput(1, (5,)), StepOutput(2, (6,)), failure]


@given(st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 9)).map(tuple))))
def test_every_sequence_keeps_its_tokens_in_order(steps: list[tuple[int, tuple[int, ...]]]) -> None:
    merged = {output.sequence_id: output for output in merge_steps([StepOutput(*step) for step in steps])}
    for sequence_id in {step[0] for step in steps}:
        expected = [token_id for step in steps if step[0] == sequence_id for token_id in step[1]]
        assert list(merged[sequence_id].token_ids) == expected
