"""`Slot`: one model as the daemon keeps it, in memory or not: who uses it, who waits for it, how long it stays.

A record with rules and no initiative: it counts leases, admits its line and runs down its keep-alive.
`app.residency.lifecycle` moves it from phase to phase, `app.residency.describe` says what it is like.  Belongs to
the event loop's thread.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from app.errors import QueueFull
from app.residency.arithmetic.tenants import Need
from app.residency.waiting_line import WaitingLine
from app.residency.wishes import Wishes
from app.residency.workers.model_loader import ResidentModel, WorkerKey
from engine.api.wire import Progress
from store.models import InstalledModel

LONGEST_WAIT_S = 1800.0
"""For a model's turn, or for the end of its requests: longer than any queue, so something there has no end."""
LONGEST_RETRY_AFTER_S = 60.0
_UNKNOWN_LOAD_S = 5.0
_REQUESTED = "A request asked for it."


class Phase(Enum):
    COLD = auto()
    LOADING = auto()
    READY = auto()
    DRAINING = auto()  # open requests go on to their end, new ones wait
    LEAVING = auto()  # its worker is ending
    FALLING_ASLEEP = auto()
    ASLEEP = auto()
    WAKING = auto()


ON_ITS_WAY = (Phase.LOADING, Phase.LEAVING, Phase.FALLING_ASLEEP, Phase.WAKING)
"""Phases that end by themselves, soon."""


@dataclass(frozen=True, slots=True)
class Told:
    """Who hears of a slot: that who comes next may have changed, that it is in use, that its time is over."""

    changed: Callable[[], None]
    used: Callable[[], None]
    expired: Callable[[Slot], None]


class Slot:
    """`name` is unique among slots; `names` are the installed models of these files that it answers for.

    Times are the event loop's, in seconds.
    """

    def __init__(
        self, key: WorkerKey, installed: InstalledModel, name: str, wishes: Wishes, max_queue: int, told: Told
    ) -> None:
        self.key = key
        self.installed = installed
        self.name = name
        self.names = [installed.name]
        self.wishes = wishes
        self._first_wishes = replace(wishes)
        self.is_kept = False
        """Somebody has said how the model is to be kept, which holds the next time it is loaded, too."""
        self.keep_alive_s = wishes.keep_alive_s
        self.phase = Phase.COLD
        self.line = WaitingLine()
        self.note = ""
        """What it is doing, for people; those who listen hear what is given to `say`."""
        self.failure = ""
        """Why it is not there, until somebody asks for it anew."""
        self.progress_listeners: set[asyncio.Queue[Progress | None]] = set()

        self.model: ResidentModel | None = None
        self.device = ""
        self.need: Need | None = None
        self.measured_bytes = 0
        """What its last worker held besides its KV cache: better than any estimate."""
        self.num_attempts = 0
        self.asleep_bytes = 0
        self.host_bytes = 0

        self.num_leases = 0
        self.num_uses = 0
        self.last_used_at = 0.0
        self.load_seconds = 0.0
        self.turn_began_at = 0.0
        self.expires_at: float | None = None
        self._owed: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._max_queue = max_queue
        self._told = told

    @property
    def is_open(self) -> bool:
        """Whether a request is served at once."""
        return self.phase is Phase.READY and self.model is not None and self.model.worker.failure is None

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it to be loaded or woken."""
        return len(self.line) > 0 and self.phase in (Phase.COLD, Phase.ASLEEP)

    @property
    def is_idle(self) -> bool:
        return self.num_leases == 0

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing to be remembered of it."""
        return self.phase is Phase.COLD and self.is_idle and not (self.line or self.failure or self.is_kept)

    @property
    def num_owed(self) -> int:
        """Of the requests that were queued when its turn began, those that are not answered yet."""
        return len(self._owed)

    def join(self) -> asyncio.Future[None]:
        """A request's place in line, for `admitted`; raises `QueueFull`."""
        num_open = self.num_leases + len(self.line)
        if num_open >= self._max_queue:
            raise QueueFull(
                f"{self.name} already has {num_open:,} open requests; try again in a moment.",
                retry_after_s=self._retry_after_s(),
            )
        return self.join_by_hand(_REQUESTED)

    def join_by_hand(self, why: str) -> asyncio.Future[None]:
        """A place in line for no request but for the reason that `why` says; the queue has no bound for it."""
        place = self.line.join(why)
        if self.is_open:
            self._admit_line()
        else:
            self._told.changed()
        return place

    async def admitted(self, place: asyncio.Future[None]) -> None:
        """Wait until the model serves; a lease begins then, which `leave` ends.  Raises why the model cannot serve."""
        try:
            await place
        except asyncio.CancelledError:
            if self.line.leave(place):
                self.leave(place)
            self._told.changed()
            raise

    def leave(self, place: asyncio.Future[None], keep_alive_s: float | None = None) -> None:
        """End a lease; from now on the model stays for `keep_alive_s` after its last request, None: as before."""
        self.num_leases -= 1
        self.last_used_at = asyncio.get_running_loop().time()
        self._owed.discard(place)
        if keep_alive_s is not None:
            self.keep_alive_s = keep_alive_s
        if self.is_idle:
            self.run_down()
            self._told.changed()

    def drain(self, note: str) -> None:
        """Take no new requests until `resume_turn` or another phase; `note` says why."""
        self.phase = Phase.DRAINING
        self.say(note)

    def begin_turn(self) -> None:
        """It serves from now on; everybody in line is admitted and owed an answer before its turn ends."""
        self.phase = Phase.READY
        self.note = self.failure = ""
        self.num_attempts = 0
        self.turn_began_at = self.last_used_at = asyncio.get_running_loop().time()
        self._owed = set(self._admit_line())
        self.run_down()

    def resume_turn(self) -> None:
        """It takes requests again, having been about to make room."""
        self.phase = Phase.READY
        self.note = ""
        self._admit_line()
        self.run_down()

    def forget_wishes(self) -> None:
        """What people have said of the model holds no longer, but what the settings say."""
        self.wishes, self.failure, self.is_kept = replace(self._first_wishes), "", False

    def say(self, note: str) -> None:
        """Tell those who wait what is happening."""
        if note != self.note:
            self.report(Progress(note, 0, 0))

    def report(self, progress: Progress) -> None:
        """Pass on how far its worker is."""
        self.note = progress.stage
        for listener in self.progress_listeners:
            listener.put_nowait(progress)

    def run_down(self) -> None:
        """Let the keep-alive begin, if the model may leave by itself; as long is remembered why it is not there."""
        self._stop_timer()
        is_here = self.phase in (Phase.READY, Phase.ASLEEP) or (self.phase is Phase.COLD and self.failure)
        if is_here and self.is_idle and not self.wishes.is_pinned and not math.isinf(self.keep_alive_s):
            loop = asyncio.get_running_loop()
            self.expires_at = loop.time() + self.keep_alive_s
            self._timer = loop.call_at(self.expires_at, self._expire)

    def _admit_line(self) -> list[asyncio.Future[None]]:
        admitted = self.line.admit()
        self.num_leases += len(admitted)
        self.num_uses += len(admitted)
        if admitted:
            self._stop_timer()
            self._told.used()
        return admitted

    def _expire(self) -> None:
        self._stop_timer()
        self._told.expired(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.expires_at = None

    def _retry_after_s(self) -> float:
        """About as long as it takes until there is a place: a load, or a moment."""
        if self.phase is Phase.READY:
            return 1.0
        return min(self.load_seconds or _UNKNOWN_LOAD_S, LONGEST_RETRY_AFTER_S)
