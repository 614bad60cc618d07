"""A step that the memory budget has no room for shrinks, and says so."""

from __future__ import annotations

import pytest

from engine.api.errors import InsufficientMemory
from engine.runner.memory import CachePlan
from engine.sizing import SMALLEST_TOKEN_BUDGET, Limits, shrink_to_fit

WANTED = Limits(max_model_len=4096, max_num_seqs=16, max_num_batched_tokens=8192)


def plan_with_room_for(num_tokens: int, notes: tuple[str, ...] = ()):
    def plan(limits: Limits) -> CachePlan:
        if limits.max_num_batched_tokens > num_tokens:
            raise InsufficientMemory(f"no room for {limits.max_num_batched_tokens}")
        return CachePlan(7, limits.max_model_len, 9, limits.max_model_len, fixed_bytes=1, notes=notes)

    return plan


def test_limits_that_fit_stay() -> None:
    limits, plan = shrink_to_fit(WANTED, plan_with_room_for(8192, ("as planned",)))
    assert limits == WANTED
    assert plan.notes == ("as planned",)


def test_steps_are_halved_until_they_fit() -> None:
    limits, plan = shrink_to_fit(WANTED, plan_with_room_for(3000, ("as planned",)))
    assert limits == Limits(4096, 16, 2048)
    assert "2,048 tokens instead of 8,192" in plan.notes[0]
    assert plan.notes[1] == "as planned"


def test_when_even_small_steps_do_not_fit_the_reason_is_that_of_the_smallest() -> None:
    with pytest.raises(InsufficientMemory, match=str(SMALLEST_TOKEN_BUDGET)):
        shrink_to_fit(WANTED, plan_with_room_for(10))


def test_without_chunks_nothing_shrinks() -> None:
    with pytest.raises(InsufficientMemory, match="8192"):
        shrink_to_fit(WANTED, plan_with_room_for(3000), may_chunk=False)
