"""`Arranger`: brings in the models that requests wait for, one after another, and makes room for them.

Asks `placement` where a model goes and who leaves for it, and `turns` whose turn it is when nobody is idle.  Runs
only while somebody waits.  Two loads never run at once on one device; requests for models that are there go on
meanwhile.  Owned by the supervisor; `app.residency.lifecycle` does what is decided here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from app.residency.arithmetic.ledger import Ledger, Overdrawn
from app.residency.arithmetic.placement import place, wake_placement
from app.residency.arithmetic.tenants import Action, DeviceShare, Need, NoRoom, Placement, Shrink, Sleep, Tenant
from app.residency.arithmetic.turns import Turn, Waiting, next_turn
from app.residency.events import EventKind, EventLog
from app.residency.lifecycle import Lifecycle
from app.residency.room import Room
from app.residency.slot import LONGEST_WAIT_S, Phase, Slot
from app.residency.words import span_text
from app.residency.workers.model_loader import WorkerKey
from engine.api.errors import EngineError, InsufficientMemory
from store.errors import StoreError

logger = logging.getLogger(__name__)

_MOST_TRIES = 4
"""Of making room for one model, where a worker gave less than was expected of it."""

_LOOK_AGAIN_S = 1.0
"""While a model waits for its turn: nobody says when the requests that are owed an answer have got it."""
_PAUSE_S = 0.01
"""Between two looks, however much happens meanwhile."""

NeedOf = Callable[[Slot, Sequence[DeviceShare]], Awaitable[Need]]
"""What a model will take; raises the error that whoever waits for it gets."""


class Arranger:
    """Who comes next; `wake_up` whenever that may have changed."""

    def __init__(
        self,
        slots: Mapping[WorkerKey, Slot],
        room: Room,
        ledger: Ledger,
        lifecycle: Lifecycle,
        events: EventLog,
        need_of: NeedOf,
    ) -> None:
        self._slots = slots
        self._room = room
        self._ledger = ledger
        self._lifecycle = lifecycle
        self._events = events
        self._need_of = need_of
        self._task: asyncio.Task[None] | None = None
        self._has_news = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._drained_for: dict[Slot, Slot] = {}
        """Whom those make room for that are being drained."""

    def wake_up(self) -> None:
        """Look again soon; costs nothing while nobody waits."""
        self._has_news = True
        if self._is_closed:
            return
        if not self._drained_for and not any(slot.is_wanted for slot in self._slots.values()):
            return
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Bring nobody in any more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._has_news:
            self._has_news = False
            try:
                async with self._room.deciding:
                    await self._arrange()
            except Exception as error:
                # Better an error for everybody than that anybody waits for ever.
                logger.exception("The models that are waited for could not be arranged")
                for slot in self._wanted():
                    self._lifecycle.refuse(slot, error, f"It could not be arranged: {error}")
            await asyncio.sleep(_PAUSE_S)

    async def _arrange(self) -> None:
        self._end_needless_drains()
        blocked = []
        for slot in self._wanted():
            if slot.is_wanted and (refusal := await self._bring(slot)) is not None:
                blocked.append((slot, refusal))
        self._refuse_overdue(blocked)
        self._end_needless_drains()
        await self._take_turns([(slot, refusal) for slot, refusal in blocked if slot.is_wanted])

    def _wanted(self) -> list[Slot]:
        """Those that somebody waits for, the longest wait first."""
        wanted = [slot for slot in self._slots.values() if slot.is_wanted]
        return sorted(wanted, key=lambda slot: (slot.line.first.at if slot.line.first else 0.0, slot.name))

    async def _bring(self, slot: Slot) -> NoRoom | None:
        """Start loading or waking a model, with the room that takes; returns why that has to wait, if it has to."""
        try:
            return await self._try_to_bring(slot)
        except Exception as error:
            if not isinstance(error, (EngineError, StoreError)):
                logger.exception("%s could not be arranged", slot.name)
            kind: EventKind = "refuse" if isinstance(error, InsufficientMemory) else "fail"
            self._lifecycle.refuse(slot, error, f"It cannot be loaded: {getattr(error, 'message', error)}", kind)
            return None

    async def _try_to_bring(self, slot: Slot) -> NoRoom | None:
        for _ in range(_MOST_TRIES):
            devices = await self._room.measure(slot.device or slot.wishes.device)
            found = await self._find_room(slot, devices)
            if isinstance(found, NoRoom):
                if found.could_wait:
                    slot.say(found.sentence)
                    return found
                raise InsufficientMemory(found.sentence)
            device = next(one for one in devices if one.name == found.device)
            if not slot.is_wanted or self._must_wait_for_others(slot, device):
                return None
            await self._make_room(found, device)
            if self._start(slot, found, device):
                return None
        raise InsufficientMemory(f"There is no room for {slot.name} at this moment; try again.")

    def _start(self, slot: Slot, placement: Placement, device: DeviceShare) -> bool:
        """Load or wake it, if somebody still waits; false if there is less room than there should be."""
        try:
            if slot.is_wanted and slot.phase is Phase.ASLEEP:
                self._lifecycle.start_wake(slot, placement, device)
            elif slot.is_wanted:
                self._lifecycle.start_load(slot, placement, device)
        except Overdrawn as error:
            logger.info("%s finds less room than there was: %s", slot.name, error)
            return False
        return True

    async def _find_room(self, slot: Slot, devices: Sequence[DeviceShare]) -> Placement | NoRoom:
        host_free_bytes = await self._room.host_free_bytes()
        now = asyncio.get_running_loop().time()
        if slot.phase is Phase.COLD:
            if slot.need is None:
                slot.need = await self._need_of(slot, devices)
                if slot.measured_bytes:
                    slot.need = replace(slot.need, fixed_bytes=slot.measured_bytes, certain_bytes=None)
            return place(
                slot.name,
                slot.need,
                share=slot.wishes.share,
                device_wish=slot.wishes.device,
                devices=devices,
                tenants=self._room.tenants(),
                host_free_bytes=host_free_bytes,
                now=now,
            )
        tenants = self._room.tenants()
        sleeper = next(tenant for tenant in tenants if tenant.name == slot.name)
        device = next(one for one in devices if one.name == slot.device)
        return wake_placement(sleeper, device=device, tenants=tenants, host_free_bytes=host_free_bytes, now=now)

    def _must_wait_for_others(self, slot: Slot, device: DeviceShare) -> bool:
        """Whether the device is being loaded on, or being cleared for a model with an older claim."""
        if slot.phase is Phase.COLD and any(
            other.phase is Phase.LOADING and other.device == device.name for other in self._slots.values()
        ):
            slot.say(f"waiting until another model is loaded on {device.name}")
            return True
        return any(
            drained.device == device.name and claimant is not slot for drained, claimant in self._drained_for.items()
        )

    async def _make_room(self, placement: Placement, device: DeviceShare) -> None:
        """Let others shrink, sleep and leave.  Those that leave take no new requests from the first moment on."""
        by_name = {slot.name: slot for slot in self._slots.values()}
        leaving = [by_name[action.name] for action in placement.actions if not isinstance(action, Shrink)]
        for slot in leaving:
            slot.phase = Phase.ASLEEP if slot.phase is Phase.ASLEEP else Phase.DRAINING
        for action, why in placement.steps:
            try:
                await self._carry_out(action, by_name[action.name], device, why)
            except EngineError as error:
                # The next look tells how much room there is now.
                logger.info("%s made no room: %s", action.name, error.message)
        for slot in leaving:
            if slot.phase is Phase.DRAINING:
                slot.resume_turn()

    async def _carry_out(self, action: Action, slot: Slot, device: DeviceShare, why: str) -> None:
        if slot.model is None:
            return
        if isinstance(action, Shrink):
            await self._lifecycle.resize(slot, action.kv_bytes, device, why)
            return
        if isinstance(action, Sleep):
            try:
                await self._lifecycle.sleep(slot, why)
            except InsufficientMemory as error:
                why = f"{why} It could not sleep: {error.message}"
            else:
                return
        told = f"The model {slot.name} was stopped to make room for another; ask again."
        await self._lifecycle.end(slot, "evict", why, told=told)

    def _refuse_overdue(self, blocked: Sequence[tuple[Slot, NoRoom]]) -> None:
        """Nobody waits for ever, whatever the models in the way are doing."""
        now = asyncio.get_running_loop().time()
        for slot, refusal in blocked:
            if slot.line.waited_s(now) >= LONGEST_WAIT_S:
                why = f"Its turn did not come within {span_text(LONGEST_WAIT_S)}: {refusal.sentence}"
                self._events.record("refuse", slot.name, why)
                error = InsufficientMemory(f"{slot.name} cannot serve.  {why}")
                slot.line.refuse(error, who_came_by=now - LONGEST_WAIT_S)
                # Whoever waited behind it may be next.
                self._has_news = True

    def _end_needless_drains(self) -> None:
        """Those for whom others were drained have come, or nobody waits for them any more."""
        for drained, claimant in list(self._drained_for.items()):
            if not claimant.is_wanted or drained.phase is not Phase.DRAINING:
                del self._drained_for[drained]
                if drained.phase is Phase.DRAINING:
                    drained.resume_turn()

    async def _take_turns(self, blocked: Sequence[tuple[Slot, NoRoom]]) -> None:
        """Nobody idle is in the way of those: drain whoever had a turn for longest, if it is time."""
        if not blocked:
            return
        devices = {device.name: device for device in await self._room.measure_in_use()}
        loop = asyncio.get_running_loop()
        now = loop.time()
        here = {slot.name: slot for slot in self._slots.values() if slot.phase in (Phase.READY, Phase.DRAINING)}
        turns = [
            _turn_of(here[tenant.name], tenant, devices[tenant.device], now)
            for tenant in self._room.tenants()
            if tenant.name in here and tenant.device in devices
        ]
        turn = next_turn([_waiting(slot, refusal, now) for slot, refusal in blocked], turns)
        if turn is None:
            return
        claimant = next(slot for slot, _ in blocked if slot.name == turn.load)
        for name in turn.drain:
            self._drain(here[name], claimant, now)
        if self._timer is None:
            self._timer = loop.call_later(_LOOK_AGAIN_S, self._look_again)

    def _drain(self, slot: Slot, claimant: Slot, now: float) -> None:
        slot.drain(f"finishes its requests before it is the turn of {claimant.name}")
        self._drained_for[slot] = claimant
        waited = span_text(claimant.line.waited_s(now))
        self._events.record(
            "drain", slot.name, f"Requests for {claimant.name} have waited for {waited}; it is its turn.",
            device=slot.device,
        )  # fmt: skip

    def _look_again(self) -> None:
        self._timer = None
        self.wake_up()


def _waiting(slot: Slot, refusal: NoRoom, now: float) -> Waiting:
    return Waiting(
        name=slot.name,
        device=refusal.device,
        oldest_wait_s=slot.line.waited_s(now),
        num_queued=len(slot.line),
        short_bytes=refusal.short_bytes,
    )


def _turn_of(slot: Slot, tenant: Tenant, device: DeviceShare, now: float) -> Turn:
    kept_kv = max(tenant.needed_kv_bytes, tenant.entitled_bytes(device) - tenant.fixed_bytes)
    return Turn(
        name=slot.name,
        device=slot.device,
        turn_s=now - slot.turn_began_at,
        num_owed=slot.num_owed,
        frees_bytes=tenant.reserved_bytes(device) - max(0, tenant.kv_bytes - kept_kv),
        is_busy=tenant.is_busy,
        is_pinned=tenant.is_pinned,
        is_draining=slot.phase is Phase.DRAINING,
    )
