"""`Room`: the devices of this machine as the daemon may use them, and who is on them.

Measures, and turns slots and the ledger into the plain values that `placement` and `resplit` work on.  Whoever
decides about memory holds `deciding`, so that no two decisions count on the same bytes.  Used by the supervisor's
parts, on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.residency.arithmetic.ledger import Ledger
from app.residency.arithmetic.memory import DeviceMemory, device_share, is_gpu
from app.residency.arithmetic.tenants import DeviceShare, Tenant
from app.residency.describe import tenant_of
from app.residency.slot import Phase, Slot
from app.residency.workers.model_loader import WorkerKey
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class Gauges:
    """How memory is measured; both may take a moment and run in threads.

    `devices` are those that the engine takes for a setting ("auto", "cpu", "cuda:1"); `own_bytes` is what processes
    hold of this machine's RAM for themselves.
    """

    devices: Callable[[str], Sequence[DeviceMemory]]
    own_bytes: Callable[[Iterable[int]], int]


class Room:
    """`slots` is the supervisor's own, and changes."""

    def __init__(self, settings: Settings, gauges: Gauges, ledger: Ledger, slots: Mapping[WorkerKey, Slot]) -> None:
        self._settings = settings
        self._gauges = gauges
        self._ledger = ledger
        self._slots = slots
        self._others: dict[str, int] = {}
        self._totals: dict[str, int] = {}
        self.deciding = asyncio.Lock()

    def total_bytes(self, device: str) -> int:
        """Of a device that was measured before; else 0."""
        return self._totals.get(device, 0)

    async def measure(self, setting: str | None = None) -> tuple[DeviceShare, ...]:
        """The devices that a setting stands for; None: those of all models that have no wish of their own."""
        return await self._measure({setting or self._settings.device})

    async def measure_in_use(self) -> tuple[DeviceShare, ...]:
        """The devices that models are on."""
        in_use = {slot.device for slot in self._slots.values() if slot.device}
        return tuple(device for device in await self._measure(in_use) if device.name in in_use)

    async def measure_one(self, device: str) -> DeviceShare | None:
        """One device by its name; None if it is there no more."""
        return next((one for one in await self._measure({device}) if one.name == device), None)

    async def _measure(self, settings: Collection[str]) -> tuple[DeviceShare, ...]:
        models = [slot.model for slot in self._slots.values() if slot.model is not None and not is_gpu(slot.device)]
        pids = [model.worker.pid for model in models if model.worker.pid is not None]

        def ask() -> tuple[dict[str, DeviceMemory], int]:
            found = {one.device: one for setting in sorted(settings) for one in self._gauges.devices(setting)}
            return found, self._gauges.own_bytes(pids)

        held_before = {entry.device: self._ledger.held_bytes(entry.device) for entry in self._ledger}
        memories, own_ram_bytes = await asyncio.to_thread(ask)
        # What came or went while that was measured is not taken for somebody else's.
        return tuple(
            self._share(memory, max(held_before.get(memory.device, 0), self._ledger.held_bytes(memory.device)))
            if is_gpu(memory.device)
            else self._share(memory, own_ram_bytes)
            for memory in memories.values()
        )

    async def host_free_bytes(self) -> int:
        """What models that sleep may still take of this machine's RAM; 0 where none is on a GPU, which alone sleep."""
        if not any(is_gpu(slot.device) for slot in self._slots.values()):
            return 0
        memory = (await asyncio.to_thread(self._gauges.devices, "cpu"))[0]
        return max(0, int(memory.total_bytes * self._settings.memory_limit) - memory.used_bytes)

    def slot_of(self, name: str) -> Slot | None:
        """Whose tenant or entry has this name."""
        return next((slot for slot in self._slots.values() if slot.name == name), None)

    def tenants(self) -> tuple[Tenant, ...]:
        """Everyone who holds memory, wherever."""
        here = (slot for slot in self._slots.values() if slot.name in self._ledger)
        return tuple(tenant_of(slot, self._ledger.held_by(slot.name)) for slot in here)

    def tenants_on(self, device: str) -> tuple[Tenant, ...]:
        return tuple(tenant for tenant in self.tenants() if tenant.device == device)

    def _share(self, memory: DeviceMemory, own_bytes: int) -> DeviceShare:
        """What is in use beyond what is ours belongs to others.

        On a GPU a worker holds what it was promised, in RAM what it has touched of that.  While one comes or goes
        its part is not known, and others count as they did before.
        """
        device = memory.device
        self._totals[device] = memory.total_bytes
        share = device_share(memory, self._settings.memory_limit, own_bytes)
        unsettled = (Phase.LOADING, Phase.WAKING, Phase.FALLING_ASLEEP, Phase.LEAVING)
        if any(slot.device == device and slot.phase in unsettled for slot in self._slots.values()):
            known = self._others.get(device, share.others_bytes)
            others = max(share.others_bytes, known) if is_gpu(device) else known
            return DeviceShare(share.name, share.total_bytes, others, share.limit)
        self._others[device] = share.others_bytes
        return share
