"""uvicorn, taught to end open answers in order: each gets its own last words before the process goes.

Plain uvicorn waits for open answers and then cancels them, which clients see as a torn
connection.  Used by `app.server.serve`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import uvicorn

LAST_RESORT_S = 12
"""When uvicorn may cancel what even draining did not end."""
_TICK_S = 0.5


class DrainingServer(uvicorn.Server):
    """Calls `drain` as soon as no new connections are taken; it must end all open answers."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]]) -> None:
        config.timeout_graceful_shutdown = LAST_RESORT_S
        super().__init__(config)
        self._drain = drain

    async def main_loop(self) -> None:
        """Look now and then whether to exit; uvicorn does it ten times a second, which an idle daemon shows."""
        while not await self.on_tick(0):  # noqa: ASYNC110  # signal handlers of uvicorn set a flag, no event
            await asyncio.sleep(_TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(self._drain())
        await super().shutdown(sockets)
        await draining
