"""`WaitingLine`: requests in line for one model, while it is not there or has another model's turn to wait for.

Each is admitted or refused exactly once, or leaves of its own accord.  Knows nothing of models; used by
`app.residency.slot`, on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """When somebody came into line, by the event loop's clock in seconds, and why, in a sentence."""

    at: float
    why: str


class WaitingLine:
    """Places in the order of arrival."""

    def __init__(self) -> None:
        self._places: dict[asyncio.Future[None], Arrival] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def first(self) -> Arrival | None:
        """Who came first; None while nobody waits."""
        return next(iter(self._places.values()), None)

    def waited_s(self, now: float) -> float:
        """For how long the first one has waited; 0 while nobody does."""
        return 0.0 if self.first is None else now - self.first.at

    def join(self, why: str) -> asyncio.Future[None]:
        """A place at the end of the line, to be awaited: it ends with the admission, or raises the refusal.

        Whoever is cancelled while it waits calls `leave`.
        """
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._places[place] = Arrival(loop.time(), why)
        return place

    def leave(self, place: asyncio.Future[None]) -> bool:
        """Give up a place; true if its owner had been admitted in the same moment."""
        self._places.pop(place, None)
        # Asking for the exception also tells asyncio that somebody knows of it.
        return not place.cancel() and not place.cancelled() and place.exception() is None

    def admit(self) -> list[asyncio.Future[None]]:
        """Admit everybody; returns their places."""
        places = self._take(math.inf)
        for place in places:
            place.set_result(None)
        return places

    def refuse(self, error: Exception, *, who_came_by: float = math.inf) -> None:
        """Raise `error` for everybody, or for those who came at that time or before."""
        for place in self._take(who_came_by):
            place.set_exception(error)

    def _take(self, who_came_by: float) -> list[asyncio.Future[None]]:
        """All who still wait; one that was cancelled leaves as soon as its owner runs."""
        taken = [place for place, arrival in self._places.items() if arrival.at <= who_came_by]
        for place in taken:
            del self._places[place]
        return [place for place in taken if not place.done()]
