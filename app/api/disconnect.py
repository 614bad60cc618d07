"""Racing work against a client that leaves.

Neither server nor framework cancels a handler whose client is gone, so whatever may take
long waits for both.  Used by `app.api.streaming` and by routes that answer in one piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from litestar.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is there to read the answer."""


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has left; the request body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises `ClientGone` when the client leaves first."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
