"""The event log: order, bounds, followers."""

from __future__ import annotations

import asyncio
import logging
from itertools import count

import pytest

from app.residency.events import Event, EventLog


def numbers(events: tuple[Event, ...]) -> list[int]:
    return [event.number for event in events]


def test_events_are_numbered_and_the_oldest_go_first() -> None:
    log = EventLog(max_events=3, clock=count(100.0).__next__)
    for name in ("a", "b", "c", "d"):
        log.record("load", name, "Somebody asked for it.", device="cpu", size_bytes=7)

    assert numbers(log.after()) == [2, 3, 4]
    assert numbers(log.after(3)) == [4]
    assert log.after(3)[0] == Event(
        number=4, at=103.0, kind="load", model="d", why="Somebody asked for it.", device="cpu", size_bytes=7
    )


async def test_a_follower_sees_what_was_and_what_comes() -> None:
    log = EventLog()
    log.record("load", "m", "Somebody asked for it.")
    seen: list[str] = []

    async def follow() -> None:
        async for event in log.follow():
            seen.append(event.kind)
            if event.kind == "unload":
                return

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    assert seen == ["load"]
    log.record("ready", "m", "It is loaded.")
    log.record("sleep", "m", "Another model needs room.")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    log.record("unload", "m", "Nobody asked for it.")
    await following
    assert seen == ["load", "ready", "sleep", "unload"]


@pytest.mark.parametrize(("kind", "level"), [("load", "INFO"), ("refuse", "WARNING"), ("fail", "ERROR")])
def test_each_event_is_a_line_of_the_log(kind: str, level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        EventLog().record(kind, "m", "This is why.")  # type: ignore[arg-type]

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (level, f"{kind} m: This is why.")
    ]


async def test_followers_end_with_the_log() -> None:
    log = EventLog()

    async def follow() -> list[str]:
        return [event.kind async for event in log.follow()]

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    log.record("unload", "m", "The daemon ends.")
    log.close()
    assert await following == ["unload"]
    assert [event.kind async for event in log.follow()] == ["unload"]
