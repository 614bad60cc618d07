"""Whole texts wait for an encoder: what a step takes, and that none is lost or waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.errors import ContextLengthExceeded, InvalidParameter
from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from engine.core.text_queue import TextQueue


def text(sequence_id: int, num_tokens: int) -> Prompt:
    return Prompt(sequence_id, (1,) * num_tokens, 0, SamplingParams(), pooling=Pooling("embed"))


def queue_of(*lengths: int, max_num_tokens: int = 100, max_num_texts: int = 4) -> TextQueue:
    queue = TextQueue(max_num_tokens=max_num_tokens, max_num_texts=max_num_texts, max_model_len=100)
    for sequence_id, length in enumerate(lengths, start=1):
        queue.add(text(sequence_id, length))
    return queue


def ids(prompts: list[Prompt]) -> list[int]:
    return [prompt.sequence_id for prompt in prompts]


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(100, 300), st.integers(1, 9), st.data())
def test_every_text_is_taken_once_in_order_within_the_bounds(
    lengths: list[int], max_num_tokens: int, max_num_texts: int, data: st.DataObject
) -> None:
    queue = queue_of(*lengths, max_num_tokens=max_num_tokens, max_num_texts=max_num_texts)
    removed = data.draw(st.sets(st.integers(1, 41)))
    assert {one for one in removed if queue.remove(one)} == {one for one in removed if one <= len(lengths)}
    taken: list[int] = []
    while len(queue):
        step = queue.take()
        assert 1 <= len(step) <= max_num_texts
        assert sum(len(prompt.token_ids) for prompt in step) <= max_num_tokens
        taken += ids(step)
    assert taken == [one for one in range(1, len(lengths) + 1) if one not in removed]
    assert queue.take() == []


def test_a_step_ends_before_the_text_that_does_not_fit() -> None:
    queue = queue_of(60, 41, 5, 99)
    assert [ids(queue.take()) for _ in range(3)] == [[1], [2, 3], [4]]


def test_what_can_never_run_is_refused() -> None:
    queue = queue_of()
    with pytest.raises(ContextLengthExceeded):
        queue.add(text(1, 101))
    with pytest.raises(InvalidParameter, match="no tokens"):
        queue.add(text(1, 0))
    assert len(queue) == 0


def test_all_are_forgotten_at_once() -> None:
    queue = queue_of(3, 4)
    assert 2 in queue
    assert ids(queue.clear()) == [1, 2]
    assert 2 not in queue and len(queue) == 0
