"""`Balancer`: the live re-split: while models are busy, KV cache moves to those that are short of it.

Looks at every device once a second and lets `resplit` decide; nothing runs while no model has a request.  Owned by
the supervisor, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from app.residency.arithmetic.ledger import Overdrawn
from app.residency.arithmetic.resplit import is_restored, is_short, resplit, restore
from app.residency.arithmetic.tenants import DeviceShare
from app.residency.lifecycle import Lifecycle
from app.residency.room import Room
from app.residency.slot import Phase, Slot
from app.residency.workers.model_loader import WorkerKey
from engine.api.errors import EngineError

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
_QUIET_INTERVALS = 10
"""While nobody is short it is looked less often whether other programs have taken what was promised."""
_RESTORE_INTERVAL_S = 10.0
"""What could not be had is not asked for again by every request."""
_REFUSED_S = 60.0
"""A worker that could not resize its cache is left alone for so long."""


class Balancer:
    """One loop for all devices; `wake_up` when a model gets a request."""

    def __init__(self, slots: Mapping[WorkerKey, Slot], room: Room, lifecycle: Lifecycle) -> None:
        self._slots = slots
        self._room = room
        self._lifecycle = lifecycle
        self._task: asyncio.Task[None] | None = None
        self._refused_until: dict[str, float] = {}
        self._restore_after: dict[str, float] = {}

    def wake_up(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        num_quiet = 0
        while any(slot.num_leases for slot in self._slots.values()):
            await asyncio.sleep(INTERVAL_S)
            num_quiet += 1
            if num_quiet >= _QUIET_INTERVALS or any(map(is_short, self._room.tenants())):
                num_quiet = 0
                async with self._room.deciding:
                    await self.balance()

    async def balance(self) -> None:
        """Split every device anew, as far as it takes; the caller decides about memory."""
        for device in await self._room.measure_in_use():
            for name, kv_bytes in resplit(self._room.tenants_on(device.name), device):
                await self._resize(name, kv_bytes, device)

    async def restore(self, slot: Slot) -> None:
        """Give a model that is used again, after others took what it did not use, the cache that its traffic wants.

        Otherwise its first request would find a short context.  Nobody waits here for decisions under way.
        """
        now = asyncio.get_running_loop().time()
        whole = DeviceShare(slot.device, self._room.total_bytes(slot.device), 0, 1.0)
        tenant = next((one for one in self._room.tenants_on(slot.device) if one.name == slot.name), None)
        if tenant is None or is_restored(tenant, whole):
            return
        if self._room.deciding.locked() or self._restore_after.get(slot.name, now) > now:
            return
        self._restore_after[slot.name] = now + _RESTORE_INTERVAL_S
        async with self._room.deciding:
            for device in await self._room.measure_in_use():
                for name, kv_bytes in restore(slot.name, self._room.tenants_on(device.name), device):
                    await self._resize(name, kv_bytes, device)

    async def _resize(self, name: str, kv_bytes: int, device: DeviceShare) -> None:
        slot = self._room.slot_of(name)
        now = asyncio.get_running_loop().time()
        if slot is None or slot.model is None or slot.phase not in (Phase.READY, Phase.DRAINING):
            return
        if self._refused_until.get(name, now) > now:
            return
        why = "it has no use for it." if kv_bytes < slot.model.kv_bytes else "its requests need it."
        try:
            await self._lifecycle.resize(slot, kv_bytes, device, why)
        except Overdrawn as error:
            logger.debug("%s cannot grow: %s", name, error)
        except EngineError as error:
            logger.info("The KV cache of %s keeps its size: %s", name, error.message)
            self._refused_until[name] = now + _REFUSED_S
