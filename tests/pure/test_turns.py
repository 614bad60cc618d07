"""More models than fit, all of them busy: every one gets its turn, and none is loaded in vain."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.residency.arithmetic.turns import PATIENCE_S, NextTurn, Turn, Waiting, next_turn


def waiting(name: str, oldest_wait_s: float, short: int = 10) -> Waiting:
    return Waiting(name=name, device="d", oldest_wait_s=oldest_wait_s, num_queued=1, short_bytes=short)


def turn(name: str, turn_s: float, **changes: Any) -> Turn:
    values: dict[str, Any] = {"device": "d", "num_owed": 0, "frees_bytes": 10}
    return Turn(name=name, turn_s=turn_s, **(values | changes))


def test_nobody_waits() -> None:
    assert next_turn([], [turn("a", 9)]) is None


def test_the_longest_wait_is_served_and_the_longest_turn_ends() -> None:
    found = next_turn([waiting("x", 3), waiting("y", 5)], [turn("a", 9), turn("b", 30)])
    assert found == NextTurn("y", ("b",))


def test_patience_comes_first() -> None:
    assert next_turn([waiting("x", PATIENCE_S / 2)], [turn("a", 9)]) == NextTurn("x")


def test_a_turn_does_not_end_before_its_requests_are_answered() -> None:
    assert next_turn([waiting("x", 60)], [turn("a", 50, num_owed=1)]) == NextTurn("x")
    assert next_turn([waiting("x", 60)], [turn("a", 50, num_owed=1), turn("b", 3)]) == NextTurn("x", ("b",))


def test_pinned_models_and_other_devices_are_left_alone() -> None:
    turns = [turn("a", 50, is_pinned=True), turn("b", 40, device="other"), turn("c", 30, is_busy=False)]
    assert next_turn([waiting("x", 60)], turns) == NextTurn("x")


def test_no_more_are_drained_than_it_takes() -> None:
    turns = [turn("small", 50, frees_bytes=4), turn("large", 40, frees_bytes=10), turn("third", 30)]
    assert next_turn([waiting("x", 60)], turns) == NextTurn("x", ("large",))
    assert next_turn([waiting("x", 60, short=14)], turns) == NextTurn("x", ("small", "large"))
    assert next_turn([waiting("x", 60, short=99)], turns) == NextTurn("x"), "draining all of them would not help"


def test_what_is_being_drained_already_counts() -> None:
    turns = [turn("a", 50, is_draining=True), turn("b", 40)]
    assert next_turn([waiting("x", 60)], turns) == NextTurn("x")
    assert next_turn([waiting("x", 60, short=20)], turns) == NextTurn("x", ("b",))


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Waiting], list[Turn]]:
    cold = [waiting(f"w{i}", draw(st.floats(0, 60)), draw(st.integers(0, 30))) for i in range(draw(st.integers(1, 4)))]
    here = [
        turn(
            f"r{i}", draw(st.floats(0, 60)), num_owed=draw(st.integers(0, 1)), is_pinned=draw(st.booleans()),
            is_draining=draw(st.booleans()), is_busy=draw(st.booleans()), frees_bytes=draw(st.integers(0, 15)),
        )
        for i in range(draw(st.integers(0, 5)))
    ]  # fmt: skip
    return cold, here


@given(situations())
def test_the_drained_suffice_and_each_is_needed(situation: tuple[list[Waiting], list[Turn]]) -> None:
    cold, here = situation
    found = next_turn(cold, here)
    assert found is not None
    first = next(one for one in cold if one.name == found.load)
    assert first.oldest_wait_s == max(one.oldest_wait_s for one in cold)
    by_name = {one.name: one for one in here}
    drained = [by_name[name] for name in found.drain]
    for one in drained:
        assert one.is_busy and one.num_owed == 0 and not one.is_pinned and not one.is_draining
    if drained:
        coming = sum(one.frees_bytes for one in here if one.is_draining)
        freed = sum(one.frees_bytes for one in drained)
        assert coming + freed >= first.short_bytes
        assert all(coming + freed - one.frees_bytes < first.short_bytes for one in drained)


def test_ten_models_where_two_fit() -> None:
    """32 clients ask for ten models in a random order: all are answered, and each load serves its whole queue."""
    choice = random.Random(7)
    queues: dict[str, list[float]] = {}
    here: dict[str, dict[str, Any]] = {}
    asked, answered, loads, longest_wait = 0, 0, 0, 0.0
    open_requests: list[tuple[str, float]] = []
    now = 0.0
    while answered < 400:
        now += 0.1
        while asked < 400 and sum(map(len, queues.values())) + len(open_requests) < 32:
            name = f"m{choice.randrange(10)}"
            asked += 1
            if name in here and not here[name]["draining"]:
                open_requests.append((name, now + choice.uniform(0.2, 1.0)))
            else:
                queues.setdefault(name, []).append(now)
        ended = [one for one in open_requests if one[1] <= now]
        open_requests = [one for one in open_requests if one[1] > now]
        answered += len(ended)
        for name, _ in ended:
            here[name]["owed"] = max(0, here[name]["owed"] - 1)
        busy = {name for name, _ in open_requests}
        cold = [
            Waiting(name=name, device="d", oldest_wait_s=now - times[0], num_queued=len(times), short_bytes=1)
            for name, times in queues.items()
        ]
        turns = [
            turn(name, now - one["since"], num_owed=one["owed"], is_busy=name in busy, is_draining=one["draining"],
                 frees_bytes=1)
            for name, one in here.items()
        ]  # fmt: skip
        found = next_turn(cold, turns)
        if found is None:
            continue
        for name in found.drain:
            here[name]["draining"] = True
        idle = [name for name in here if name not in busy]
        if len(here) == 2 and idle:
            del here[min(idle, key=lambda name: here[name]["since"])]
        if len(here) < 2:
            queued = queues.pop(found.load)
            longest_wait = max(longest_wait, now - queued[0])
            here[found.load] = {"since": now, "owed": len(queued), "draining": False}
            open_requests += [(found.load, now + choice.uniform(0.2, 1.0)) for _ in queued]
            loads += 1
    assert answered == asked == 400
    assert loads < 200, "a load serves several requests"
    assert longest_wait < 40
