"""`WaitingLine`: requests in line for one model, while it is not there or has another model's turn to wait for.

Each is admitted or refused exactly once, or leaves of its own accord.  Knows nothing of models; used by
`app.residency.slot`, on the event loop's thread.
"""

from __future__ import annotations

import asyncio


class WaitingLine:
    """Places in the order of arrival; times are the event loop's, in seconds."""

    def __init__(self) -> None:
        self._places: dict[asyncio.Future[None], float] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def oldest_at(self) -> float | None:
        """When the first in line came; None while nobody waits."""
        return next(iter(self._places.values()), None)

    def join(self) -> asyncio.Future[None]:
        """A place at the end of the line, to be awaited: it ends with the admission, or raises the refusal.

        Whoever is cancelled while it waits calls `leave`.
        """
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._places[place] = loop.time()
        return place

    def leave(self, place: asyncio.Future[None]) -> bool:
        """Give up a place; true if its owner had been admitted in the same moment."""
        self._places.pop(place, None)
        # Asking for the exception also tells asyncio that somebody knows of it.
        return not place.cancel() and not place.cancelled() and place.exception() is None

    def admit(self) -> list[asyncio.Future[None]]:
        """Admit everybody; returns their places."""
        places = self._take()
        for place in places:
            place.set_result(None)
        return places

    def refuse(self, error: Exception) -> None:
        """Raise `error` for everybody."""
        for place in self._take():
            place.set_exception(error)

    def _take(self) -> list[asyncio.Future[None]]:
        """All who still wait; one that was cancelled leaves as soon as its owner runs."""
        places, self._places = self._places, {}
        return [place for place in places if not place.done()]
