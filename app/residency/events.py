"""`EventLog`: why models came, went, slept and failed, newest last; each event is a line of the daemon's log too.

Keeps the last `MAX_EVENTS` in memory and writes nothing.  Belongs to the event loop's thread.  The supervisor
and its parts record; `GET /api/events` reads and follows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Literal

import msgspec

logger = logging.getLogger(__name__)

MAX_EVENTS = 1000

EventKind = Literal[
    "load",  # a worker is being started
    "ready",  # it takes requests
    "sleep",
    "wake",
    "drain",  # it takes no more requests for now, so that another model gets its turn
    "unload",  # it left at somebody's wish, or because nobody asked for it any longer
    "evict",  # it left to make room for another model
    "resize",  # its KV cache grew or shrank
    "share",
    "pin",
    "fail",
    "refuse",  # what was asked for is not possible
]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to `model`, and `why` in one sentence.

    `number` counts from 1 since the daemon's start, `at` is in seconds since the epoch.  `size_bytes` is what the
    model holds of `device` after the event; both are empty where it holds nothing.
    """

    number: int
    at: float
    kind: EventKind
    model: str
    why: str
    device: str = ""
    size_bytes: int = 0


class EventLog:
    """The latest events of one daemon; `clock` gives seconds since the epoch."""

    def __init__(self, *, max_events: int = MAX_EVENTS, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=max_events)
        self._num_recorded = 0
        self._recorded = asyncio.Event()
        self._is_closed = False

    def record(self, kind: EventKind, model: str, why: str, *, device: str = "", size_bytes: int = 0) -> None:
        """Keep an event, and log it: failures as errors, refusals as warnings."""
        self._num_recorded += 1
        event = Event(
            number=self._num_recorded,
            at=self._clock(),
            kind=kind,
            model=model,
            why=why,
            device=device,
            size_bytes=size_bytes,
        )
        self._events.append(event)
        level = {"fail": logging.ERROR, "refuse": logging.WARNING}.get(kind, logging.INFO)
        logger.log(level, "%s %s: %s", kind, model, why)
        self._recorded.set()
        self._recorded = asyncio.Event()

    def after(self, number: int = 0) -> tuple[Event, ...]:
        """The events behind event `number`, oldest first; what is too old to be kept is missing."""
        return tuple(event for event in self._events if event.number > number)

    async def follow(self, after: int = 0) -> AsyncGenerator[Event, None]:
        """The events behind event `after`, then each as it happens, until the caller leaves or the log is closed."""
        while True:
            recorded = self._recorded
            for event in self.after(after):
                after = event.number
                yield event
            if recorded is self._recorded:
                if self._is_closed:
                    return
                await recorded.wait()

    def close(self) -> None:
        """End every `follow` behind its last event: the daemon ends."""
        self._is_closed = True
        self._recorded.set()
