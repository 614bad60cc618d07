"""Models that are there from the start: in order, and one that fails is no reason for the others not to come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from app.errors import ShuttingDown
from app.residency.events import EventLog
from app.residency_settings import ResidentSettings
from app.resident_models import load_residents
from engine.api.errors import InsufficientMemory
from engine.api.wire import Progress
from store.errors import ModelNotFound

FAILURES = {
    "missing": ModelNotFound("missing is not installed; get it with `quire pull missing`."),
    "large": InsufficientMemory("large does not fit."),
    "late": ShuttingDown("The daemon is shutting down."),
}


class FakeSupervisor:
    """Loads by name, one at a time, in the order in which models come into its line."""

    def __init__(self) -> None:
        self.events = EventLog()
        self.line: list[str] = []
        self.loaded: list[str] = []
        self._is_loading = asyncio.Lock()

    async def load(self, name: str, *, why: str) -> AsyncGenerator[Progress, None]:
        # The later one asks, the sooner one is found.
        await asyncio.sleep(0.03 / (1 + len(self.line)))
        if isinstance(FAILURES.get(name), ModelNotFound):
            raise FAILURES[name]
        assert "start" in why
        self.line.append(name)
        yield Progress("looking for room", 0, 0)
        async with self._is_loading:
            yield Progress("loading weights", 1, 2)
            if name in FAILURES:
                self.events.record("fail", name, str(FAILURES[name]))
                raise FAILURES[name]
            self.loaded.append(name)


def residents(*names: str) -> tuple[ResidentSettings, ...]:
    return tuple(ResidentSettings(model=name) for name in names)


async def test_they_are_loaded_in_their_order_and_all_are_in_line_meanwhile() -> None:
    supervisor: Any = FakeSupervisor()

    await load_residents(residents("a", "b", "c"), supervisor)

    assert supervisor.line == supervisor.loaded == ["a", "b", "c"]


async def test_a_failure_is_told_once_and_the_others_come() -> None:
    supervisor: Any = FakeSupervisor()

    await load_residents(residents("missing", "large", "b", "late"), supervisor)

    assert supervisor.loaded == ["b"]
    assert [(event.kind, event.model) for event in supervisor.events.after()] == [
        ("fail", "missing"),
        ("fail", "large"),
        ("fail", "late"),
    ]


async def test_no_residents_are_no_work() -> None:
    supervisor: Any = FakeSupervisor()
    await load_residents((), supervisor)
    assert supervisor.events.after() == ()
