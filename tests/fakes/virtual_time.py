"""An event loop whose clock jumps: waiting costs nothing, and a deadlock is an error instead of a hang.

`run` is `asyncio.run` on such a loop.  Work for threads is done on the spot, so that everything happens in one order.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class Deadlock(AssertionError):
    """Everybody waits for somebody else, and no clock will change that."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never blocks: instead of waiting it tells how long it should have."""

    def __init__(self, advance: Callable[[float | None], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self._advance(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 1000 seconds and moves only when everybody waits."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_JumpingSelector(self._advance))

    def time(self) -> float:
        return self._now

    def run_in_executor(self, _executor: Any, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001  # as a thread would
            future.set_exception(error)
        return future

    def _advance(self, timeout: float | None) -> None:
        if timeout is None:
            waiting = "\n".join(str(task) for task in asyncio.all_tasks(self))
            raise Deadlock(f"nothing will ever happen; these tasks wait:\n{waiting}")
        self._now += timeout


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` to its end in virtual time; an exception that no task was there to take is raised here."""
    unseen: list[dict[str, Any]] = []
    loop = VirtualTimeLoop()
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    try:
        result = loop.run_until_complete(main)
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks are left over: {left}"
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    assert not unseen, unseen
    return result
