"""`Changes`: what people do to a model that is in memory or on its way: put it to sleep, give it another share.

Waits for what the model is doing at that moment, and decides about memory with `Room.deciding` held.  Owned by the
supervisor; `app.residency.lifecycle` does what is decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from app.errors import ModelInUse, ModelNotLoaded
from app.residency.arithmetic.ledger import Overdrawn
from app.residency.arithmetic.placement import reshare, wake_placement
from app.residency.arithmetic.tenants import DeviceShare, NoRoom, Placement, Shrink
from app.residency.events import EventLog
from app.residency.lifecycle import Lifecycle
from app.residency.room import Room
from app.residency.slot import LONGEST_WAIT_S, ON_ITS_WAY, Phase, Slot
from app.residency.words import memory_name, span_text
from engine.api.errors import InsufficientMemory


class Changes:
    """`next_change` returns when something has happened to any model."""

    def __init__(
        self,
        room: Room,
        lifecycle: Lifecycle,
        events: EventLog,
        next_change: Callable[[], Awaitable[None]],
    ) -> None:
        self._room = room
        self._lifecycle = lifecycle
        self._events = events
        self._next_change = next_change

    async def sleep(self, slot: Slot) -> None:
        """Take no new requests, wait for those that are open, and move the weights to host memory.

        Raises `ModelNotLoaded` for a model that has left meanwhile, `ModelInUse` for one whose requests do not end, and
        the `EngineError` of one that cannot sleep.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + LONGEST_WAIT_S
        while True:
            async with self._deciding_about(slot):
                if slot.phase is Phase.ASLEEP:
                    return
                if slot.phase is Phase.READY:
                    slot.drain("finishes its requests before it sleeps")
                if slot.phase is not Phase.DRAINING:
                    raise _has_left(slot)
                if slot.is_idle:
                    await self._lifecycle.sleep(slot, "Somebody put it to sleep.")
                    return
                if loop.time() >= give_up_at:
                    slot.resume_turn()
                    raise ModelInUse(
                        f"{slot.name} still has open requests after {span_text(LONGEST_WAIT_S)} and goes on serving; "
                        f"`quire stop {slot.name}` ends them."
                    )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(give_up_at):
                    await self._next_change()

    async def set_share(self, slot: Slot, share: float) -> None:
        """Give it a share of its device, at the cost of KV cache that others do not use; nobody has to leave.

        Raises `ModelNotLoaded` for a model that has left meanwhile, and `InsufficientMemory`.
        """
        async with self._deciding_about(slot):
            device = await self._room.measure_one(slot.device) if slot.device else None
            # It may have ended while that was measured.
            if device is None or slot.phase not in (Phase.READY, Phase.DRAINING, Phase.ASLEEP):
                raise _has_left(slot)
            is_asleep = slot.phase is Phase.ASLEEP
            found = self._find_share(slot, share, device, is_asleep=is_asleep)
            # Who is in the way of a model that sleeps may be idle by the time that it wakes.
            if isinstance(found, NoRoom) and not (is_asleep and found.could_wait):
                self._events.record("refuse", slot.name, found.sentence, device=device.name)
                raise InsufficientMemory(found.sentence)
            if isinstance(found, Placement) and not is_asleep:
                await self._resize_to(slot, found, device)
            slot.wishes.share = share
            when = f"will be {share:g} when it is awake" if is_asleep else f"is {share:g} of {memory_name(device.name)}"
            self._lifecycle.record(slot, "share", f"Its share {when}.")

    def _find_share(self, slot: Slot, share: float, device: DeviceShare, *, is_asleep: bool) -> Placement | NoRoom:
        """Room for a share: now, or when it wakes."""
        tenants = self._room.tenants_on(device.name)
        tenant = next(one for one in tenants if one.name == slot.name)
        now = asyncio.get_running_loop().time()
        if is_asleep:
            tenant = replace(tenant, share=share)
            return wake_placement(tenant, device=device, tenants=tenants, host_free_bytes=0, now=now)
        return reshare(tenant, share, device=device, tenants=tenants, now=now)

    async def _resize_to(self, slot: Slot, found: Placement, device: DeviceShare) -> None:
        """Let others shrink as far as it takes, then the model grow or shrink."""
        for action, why in found.steps:
            assert isinstance(action, Shrink), "nobody leaves for another's share"
            if (other := self._room.slot_of(action.name)) is not None:
                await self._lifecycle.resize(other, action.kv_bytes, device, why)
        try:
            await self._lifecycle.resize(slot, found.kv_bytes, device, "its share has changed.")
        except Overdrawn as error:
            raise InsufficientMemory(f"Others gave less than was expected of them: {error} Try again.") from error

    @asynccontextmanager
    async def _deciding_about(self, slot: Slot) -> AsyncIterator[None]:
        """Hold `Room.deciding`, once a model that is on its way has arrived or left."""
        while True:
            async with self._room.deciding:
                if slot.phase not in ON_ITS_WAY:
                    yield
                    return
            await self._next_change()


def _has_left(slot: Slot) -> ModelNotLoaded:
    return ModelNotLoaded(f"{slot.name} has left memory meanwhile; `quire events` says why.")
