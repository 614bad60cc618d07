"""`Supervisor`: the models of one daemon, those in memory and those that requests wait for.

The composition of the parts that do the work, and what routes and `app.generation` call: a request asks for a lease
(`serving`) and has it when the model serves; people load, share, pin, put to sleep, wake and stop.  Knows no HTTP and
no text.  Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from app.errors import ShuttingDown
from app.metrics import Metrics
from app.residency.arithmetic.ledger import Ledger
from app.residency.arithmetic.tenants import DeviceShare
from app.residency.arranger import Arranger, NeedOf
from app.residency.balancer import Balancer
from app.residency.changes import Changes
from app.residency.describe import state_of
from app.residency.events import EventLog
from app.residency.lifecycle import Lifecycle
from app.residency.model_state import ModelState
from app.residency.room import Gauges, Room
from app.residency.roster import Roster
from app.residency.slot import Phase, Slot, Told
from app.residency.words import span_text
from app.residency.workers.model_loader import ModelLoader, ResidentModel
from app.settings import Settings
from engine.api.errors import InsufficientMemory, WorkerDied
from engine.api.wire import Progress, Task
from store.models import InstalledModel

SHUTDOWN_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class Lease:
    """A model that serves, and what the request asked for it as."""

    resident: ResidentModel
    model: InstalledModel


class Supervisor:
    """Owns all models of one daemon."""

    def __init__(
        self,
        settings: Settings,
        loader: ModelLoader,
        metrics: Metrics,
        *,
        find_model: Callable[[str], InstalledModel],
        need_of: NeedOf,
        gauges: Gauges,
    ) -> None:
        self.events = EventLog()
        self.ledger = Ledger()
        self._settings = settings
        self._loader = loader
        self._roster = Roster(settings, find_model)
        self._slots = self._roster.slots
        self._room = Room(settings, gauges, self.ledger, self._slots)
        self._lifecycle = Lifecycle(settings, loader, self.ledger, self.events, metrics, self._changed)
        self._arranger = Arranger(self._slots, self._room, self.ledger, self._lifecycle, self.events, need_of)
        self._balancer = Balancer(self._slots, self._room, self._lifecycle)
        self._changes = Changes(self._room, self._lifecycle, self.events, self._next_change)
        self._told = Told(changed=self._changed, used=self._balancer.wake_up, expired=self._expired)
        self._work: set[asyncio.Task[Any]] = set()
        self._news = asyncio.Event()
        self._is_closing = False

    # -- requests --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def serving(
        self, name: str, *, tasks: tuple[Task, ...] = (), keep_alive: float | None = None
    ) -> AsyncIterator[Lease]:
        """A lease of the model of this name or alias, which is loaded, woken or waited for first.

        Where `tasks` are given, a model that does none of them is refused and not loaded.  While the lease lasts the
        model does not leave by itself.  `keep_alive` says how long it stays afterwards, in seconds; None leaves that as
        it is.  Raises `QueueFull`, `WrongTask`, `StoreError`, or the `EngineError` for which the model cannot serve.
        """
        slot, installed = await self._slot_of(name, tasks)
        place = slot.join()
        await slot.admitted(place)
        try:
            if slot.num_leases == 1:
                await self._undisturbed(self._balancer.restore(slot))
            if slot.model is None:
                raise WorkerDied(f"{name} ended in the very moment that it was to serve; try again.")
            yield Lease(slot.model, installed)
        finally:
            slot.leave(place, keep_alive)

    # -- people ----------------------------------------------------------------------------------------------------

    async def load(
        self,
        name: str,
        *,
        share: float | None = None,
        pin: bool | None = None,
        keep_alive: float | None = None,
        why: str = "Somebody loaded it.",
    ) -> AsyncGenerator[Progress, None]:
        """Load or wake a model, kept as these say from now on, and yield progress until it serves.

        A `keep_alive` of 0 is for once: the model leaves when it is idle, and nothing is remembered of it.
        The first progress comes as soon as the model is in line; `why` is for the event log.  Raises as `serving` does.
        """
        slot, _ = await self._slot_of(name)
        slot.is_kept = slot.is_kept or any(wish is not None for wish in (share, pin, keep_alive or None))
        # Where somebody waits already, it may be on its way with another one.
        comes_with_share = slot.phase in (Phase.COLD, Phase.ASLEEP) and not slot.line
        had_share = slot.wishes.share
        if share is not None and comes_with_share:
            slot.wishes.share = share
        if keep_alive:
            slot.wishes.keep_alive_s = slot.keep_alive_s = keep_alive
        if pin is not None:
            self._pin(slot, pin)
        try:
            async with aclosing(self._bring(slot, why)) as reports:
                async for progress in reports:
                    yield progress
        except InsufficientMemory:
            # A share that is not enough must not fail requests to come.
            if comes_with_share and slot.wishes.share == share:
                slot.wishes.share = had_share
            raise
        if share is not None and not comes_with_share:
            await self._undisturbed(self._changes.set_share(slot, share))
        if keep_alive == 0:
            slot.keep_alive_s = 0.0
            slot.run_down()

    async def wake(self, name: str) -> None:
        """Have a model that sleeps awake again.  Raises `ModelNotLoaded`, or as `serving` does."""
        slot = await self._here(name)
        async with aclosing(self._bring(slot, "Somebody woke it.")) as reports:
            async for _ in reports:
                pass

    async def sleep(self, name: str) -> None:
        """Move a model's weights to host memory, as soon as its open requests are done; later ones will wake it.

        Raises `ModelNotLoaded`, and the `EngineError` for which it cannot sleep.
        """
        await self._undisturbed(self._changes.sleep(await self._here(name)))

    async def stop(self, name: str) -> bool:
        """End a model, loading or loaded; its requests end with one error each.  False if it was not there.

        A worker that answers for other names too goes on, and so do its requests.
        """
        canonical, slot = await self._roster.answering(name)
        self._roster.forget_name(canonical)
        if slot is None:
            return False
        if slot.names != [canonical]:
            slot.names.remove(canonical)
            return True
        was_there = slot.phase is not Phase.COLD or len(slot.line) > 0
        slot.forget_wishes()
        told = f"The model {canonical} was stopped; ask again to load it anew."
        slot.line.refuse(WorkerDied(told))
        await self._undisturbed(self._lifecycle.end(slot, "unload", "Somebody stopped it.", told=told))
        return was_there

    async def pin(self, name: str, is_pinned: bool) -> None:
        """A pinned model leaves only when somebody stops it.  Raises `ModelNotLoaded`."""
        slot = await self._here(name)
        slot.is_kept = True
        self._pin(slot, is_pinned)

    async def set_share(self, name: str, share: float) -> None:
        """Give a model a share of its device; others give what they do not use, and nobody has to leave.

        One that is on its way gets it as soon as it is there.  Raises `ModelNotLoaded`, and `InsufficientMemory` with
        the share that there is room for.
        """
        slot = await self._here(name)
        await self._undisturbed(self._changes.set_share(slot, share))
        slot.is_kept = True

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def residents(self) -> tuple[ResidentModel, ...]:
        """The models that have a worker."""
        return tuple(slot.model for slot in self._slots.values() if slot.model is not None)

    def states(self) -> tuple[ModelState, ...]:
        """All models that are in memory, asked for, or failed."""
        shown = (slot for slot in self._slots.values() if slot.phase is not Phase.COLD or slot.line or slot.failure)
        return tuple(map(self._state_of, shown))

    async def state(self, name: str) -> tuple[str, ModelState]:
        """What the model of this name or alias is called, and its state.  Raises `ModelNotLoaded`, `StoreError`."""
        canonical, slot = await self._roster.here(name)
        return canonical, self._state_of(slot)

    async def devices(self) -> tuple[DeviceShare, ...]:
        """The devices that models go to or are on, measured now."""
        usual = {device.name: device for device in await self._room.measure()}
        return tuple({**usual, **{device.name: device for device in await self._room.measure_in_use()}}.values())

    def is_resident(self, name: str) -> bool:
        """Whether the model of this canonical name is in memory or on its way."""
        return any(name in slot.names and slot.phase is not Phase.COLD for slot in self._slots.values())

    def observe_stats(self) -> None:
        """Bring the metrics up to date with every worker's latest report."""
        for resident in self.residents:
            self._lifecycle.observe(resident)

    async def close(self, grace_s: float = SHUTDOWN_GRACE_S) -> None:
        """Stop everything, loads included; open requests have `grace_s` to finish, then end with one error each.

        Those that still wait in line end at once.
        """
        self._is_closing = True
        for slot in self._slots.values():
            slot.line.refuse(_shutting_down())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while any(slot.num_leases for slot in self._slots.values()):
                    await self._next_change()
        await self._arranger.close()
        await self._balancer.close()
        reason = "The daemon is shutting down."
        slots = tuple(self._slots.values())
        await asyncio.gather(*(self._lifecycle.end(slot, "unload", reason, told=reason) for slot in slots))
        await self._lifecycle.close()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._loader.close()
        self.events.close()

    # -- within ----------------------------------------------------------------------------------------------------

    async def _bring(self, slot: Slot, why: str) -> AsyncGenerator[Progress, None]:
        """Wait in line as a request does, with progress, and then only let the keep-alive begin."""
        listener: asyncio.Queue[Progress | None] = asyncio.Queue()
        place = slot.join_by_hand(why)
        if not place.done():
            listener.put_nowait(Progress(slot.note or "looking for room", 0, 0))
        slot.progress_listeners.add(listener)
        place.add_done_callback(lambda _: listener.put_nowait(None))
        try:
            while (progress := await listener.get()) is not None:
                yield progress
        finally:
            slot.progress_listeners.discard(listener)
            if slot.line.leave(place):
                slot.leave(place)
            self._changed()
        await place

    def _pin(self, slot: Slot, is_pinned: bool) -> None:
        if slot.wishes.is_pinned != is_pinned:
            slot.wishes.is_pinned = is_pinned
            why = "It stays until somebody stops it." if is_pinned else "It may leave again."
            self._lifecycle.record(slot, "pin", why)
        slot.run_down()
        self._changed()

    async def _slot_of(self, name: str, tasks: tuple[Task, ...] = ()) -> tuple[Slot, InstalledModel]:
        found = await self._roster.slot_of(name, self._told, tasks)
        if self._is_closing:
            raise _shutting_down()
        return found

    async def _here(self, name: str) -> Slot:
        _, slot = await self._roster.here(name)
        if self._is_closing:
            raise _shutting_down()
        return slot

    def _state_of(self, slot: Slot) -> ModelState:
        return state_of(
            slot,
            held_bytes=self.ledger.held_by(slot.name),
            device_bytes=self._room.total_bytes(slot.device),
            now=asyncio.get_running_loop().time(),
            epoch_now=time.time(),
        )

    def _changed(self) -> None:
        self._roster.drop_blanks()
        self._news.set()
        self._arranger.wake_up()

    async def _next_change(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _expired(self, slot: Slot) -> None:
        """Nobody has asked for a model during its keep-alive; for as long it is told why one is not there."""
        if slot.phase is Phase.COLD:
            slot.failure = ""
            self._changed()
        elif slot.phase in (Phase.READY, Phase.ASLEEP) and slot.is_idle:
            why = f"Nobody asked for it for {span_text(slot.keep_alive_s)}." if slot.keep_alive_s else "It is not kept."
            self._lifecycle.start_end(slot, "unload", why)

    async def _undisturbed(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something to its end, also when whoever wanted it leaves."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        # Its exception counts as seen then.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The daemon is shutting down; start it again and repeat the request.")
