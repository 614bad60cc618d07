"""`OpenRequests`: how many requests a resident model has open, at most so many, and since when it has none.

Belongs to the event loop's thread.  Entered by `app.generation` and `app.pooling`, looked at by the supervisor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import QueueFull


class OpenRequests:
    """The open requests of one model; `idle` is set while there are none."""

    def __init__(self, model: str, most: int) -> None:
        self._model = model
        self._most = most
        self.num = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.last_used_at = time.monotonic()

    @contextmanager
    def one(self) -> Iterator[None]:
        """One more, until the block ends.  Raises `QueueFull`."""
        if self.num >= self._most:
            raise QueueFull(f"{self._model} already has {self.num:,} open requests; try again in a moment.")
        self.num += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.num -= 1
            self.last_used_at = time.monotonic()
            if self.num == 0:
                self.idle.set()
