"""A supervisor with models that exist only as numbers: workers on fake devices, in one process and in virtual time.

`Fleet` has everything that is real above the worker process: supervisor, slots, placement, ledger, events.  A
`FakeWorker` holds what its model says, takes `step_s` per request, and can refuse, hang and die.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from app.metrics import Metrics
from app.residency.arithmetic.memory import DeviceMemory
from app.residency.arithmetic.tenants import DeviceShare, Need
from app.residency.room import Gauges
from app.residency.slot import Slot
from app.residency.supervisor import Lease, Supervisor
from app.residency.workers.model_loader import LoadOrder, ModelLoader, ResidentModel
from app.settings import Settings
from engine.api.errors import EngineError, InsufficientMemory, WorkerDied
from engine.api.wire import EngineStats, Progress, WorkerFacts, WorkerMemory
from store.errors import ModelNotFound
from store.models import InstalledModel

MIB = 2**20
GIB = 2**30
BLOCK_BYTES = MIB
BLOCK_TOKENS = 16


@dataclass
class FakeModel:
    """A model in blocks of 1 MiB of KV cache per 16 tokens; sizes in bytes, times in seconds."""

    name: str
    fixed_bytes: int = 2 * GIB
    least_blocks: int = 64
    wanted_blocks: int = 512
    most_blocks: int = 4096
    load_s: float = 5.0
    wake_s: float = 0.5
    load_error: EngineError | None = None
    real_fixed_bytes: int | None = None
    """What the worker finds that it needs, where the plan is wrong."""
    files: str = ""
    """What it shares with other names; else its own."""
    num_loads: int = 0
    num_wakes: int = 0

    @property
    def installed(self) -> InstalledModel:
        return InstalledModel(self.name, Path("/models") / (self.files or self.name), self.fixed_bytes, "path", "", 0.0)

    @property
    def need(self) -> Need:
        return Need(
            self.fixed_bytes,
            self.least_blocks * BLOCK_BYTES,
            self.wanted_blocks * BLOCK_BYTES,
            self.most_blocks * BLOCK_BYTES,
        )


class FakeWorker:
    """What the supervisor sees of `WorkerClient`, and what a request uses."""

    def __init__(self, model: FakeModel, device: str, num_blocks: int, fixed_bytes: int) -> None:
        self.model = model
        self.device = device
        self.pid = None
        self.failure: EngineError | None = None
        self.failed = asyncio.Event()
        self.fixed_bytes = fixed_bytes
        self.num_blocks = num_blocks
        self.used_blocks = 0
        self.num_open = 0
        self.is_asleep = False
        self.is_gone = False

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.num_open, num_free_blocks=self.num_blocks - self.used_blocks, num_blocks=self.num_blocks
        )

    @property
    def held_bytes(self) -> int:
        """What it really has of its device now."""
        if self.is_gone:
            return 0
        if self.is_asleep:
            return self.memory().fixed_bytes
        return self.fixed_bytes + self.num_blocks * BLOCK_BYTES

    def memory(self) -> WorkerMemory:
        weights = self.fixed_bytes * 9 // 10
        return WorkerMemory(
            num_kv_blocks=0 if self.is_asleep else self.num_blocks,
            max_model_len=max(1, self.num_blocks) * BLOCK_TOKENS,
            fixed_bytes=self.fixed_bytes - (weights if self.is_asleep else 0),
            host_bytes=weights if self.is_asleep else 0,
            is_asleep=self.is_asleep,
        )

    async def resize_cache(self, num_blocks: int) -> WorkerMemory:
        await self._pause(0.05)
        self.num_blocks = max(1, self.used_blocks, min(num_blocks, self.model.most_blocks))
        return self.memory()

    async def sleep(self) -> WorkerMemory:
        await self._pause(0.2)
        if self.num_open:
            raise EngineError("It has open sequences.")
        self.is_asleep = True
        return self.memory()

    async def wake(self, num_blocks: int) -> WorkerMemory:
        await self._pause(self.model.wake_s)
        self.model.num_wakes += 1
        self.is_asleep, self.num_blocks = False, min(num_blocks, self.model.most_blocks)
        return self.memory()

    async def close(self, _timeout_s: float, reason: str = "The model was stopped.") -> None:
        assert not (self.num_open and "make room" in reason), "a busy model was evicted"
        self.fail(WorkerDied(reason))
        await asyncio.sleep(0.1)
        self.is_gone = True

    def kill(self) -> None:
        """As SIGKILL: its memory is free at once, its requests fail, and the daemon hears of it."""
        self.is_gone = True
        self.fail(WorkerDied("The model's worker process ended (signal SIGKILL)."))

    def fail(self, error: EngineError) -> None:
        if self.failure is None:
            self.failure = error
            self.failed.set()

    async def serve(self, num_blocks: int, seconds: float) -> None:
        """One request: blocks for some time.  Raises how the worker ended, if it does meanwhile."""
        if self.failure is not None:
            raise self.failure
        assert not self.is_asleep, "a request reached a worker that sleeps"
        taken = min(num_blocks, self.num_blocks - self.used_blocks)
        self.num_open += 1
        self.used_blocks += taken
        try:
            async with asyncio.timeout(seconds):
                await self.failed.wait()
            assert self.failure is not None
            raise self.failure
        except TimeoutError:
            return
        finally:
            self.num_open -= 1
            self.used_blocks -= taken

    async def _pause(self, seconds: float) -> None:
        """Work for a while; raises as soon as the worker is dead."""
        try:
            async with asyncio.timeout(seconds):
                await self.failed.wait()
        except TimeoutError:
            return
        assert self.failure is not None
        raise self.failure


@dataclass
class Fleet:
    """Models on devices.

    `others_bytes` is what programs that are not ours hold of each device; `aliases` are other names of models.
    """

    models: dict[str, FakeModel]
    devices: dict[str, int]
    settings: Settings = field(default_factory=Settings)
    others_bytes: dict[str, int] = field(default_factory=dict)
    host_bytes: int = 64 * GIB
    aliases: dict[str, str] = field(default_factory=dict)
    workers: list[FakeWorker] = field(default_factory=list)
    num_breaking_off: int = 0
    """Loads that were broken off and whose worker is not gone yet."""
    supervisor: Supervisor = field(init=False)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(
            self.settings,
            cast(ModelLoader, self),
            Metrics(),
            find_model=self.find,
            need_of=self.need_of,
            gauges=Gauges(self.measure, lambda _pids: self.really_held("cpu")),
        )

    def find(self, name: str) -> InstalledModel:
        model = self.models.get(self.aliases.get(name, name))
        if model is None:
            raise ModelNotFound(f"{name} is not installed; get it with `quire pull {name}`.")
        return model.installed

    async def need_of(self, slot: Slot, _devices: Sequence[DeviceShare]) -> Need:
        return self.models[slot.installed.name].need

    def measure(self, setting: str) -> tuple[DeviceMemory, ...]:
        names = [name for name in self.devices if setting in ("auto", name, name.partition(":")[0])]
        if setting == "cpu" and "cpu" not in names:
            return (DeviceMemory("cpu", self.host_bytes, 0),)
        return tuple(
            DeviceMemory(name, self.devices[name], self.really_held(name) + self.others_bytes.get(name, 0))
            for name in names
        )

    def really_held(self, device: str) -> int:
        return sum(worker.held_bytes for worker in self.workers if worker.device == device)

    async def load(
        self, installed: InstalledModel, order: LoadOrder, on_progress: Callable[[Progress], None]
    ) -> ResidentModel:
        """What `ModelLoader.load` does."""
        model = self.models[installed.name]
        model.num_loads += 1
        on_progress(Progress("loading weights", 1, 2))
        try:
            await asyncio.sleep(model.load_s)
        except asyncio.CancelledError:
            self.num_breaking_off += 1
            await asyncio.sleep(0.5)
            self.num_breaking_off -= 1
            raise
        if model.load_error is not None:
            raise model.load_error
        fixed = model.real_fixed_bytes or model.fixed_bytes
        num_blocks = min((order.budget_bytes - fixed) // BLOCK_BYTES, model.most_blocks)
        if num_blocks < 1:
            raise InsufficientMemory("The weights do not fit.")
        worker = FakeWorker(model, order.device, num_blocks, fixed)
        self.workers.append(worker)
        facts = WorkerFacts(
            architecture="fake",
            dtype="bfloat16",
            device=order.device,
            max_model_len=num_blocks * BLOCK_TOKENS,
            vocab_size=1000,
            num_parameters=1000,
            weight_bytes=fixed * 9 // 10,
            kv_bytes_per_token=BLOCK_BYTES // BLOCK_TOKENS,
            num_kv_blocks=num_blocks,
            block_size=BLOCK_TOKENS,
            max_num_seqs=64,
            fixed_bytes=fixed,
            max_kv_blocks=model.most_blocks,
            load_seconds=model.load_s,
        )
        stage = SimpleNamespace(max_model_len=facts.max_model_len)
        parts: dict[str, Any] = {"worker": worker, "stage": stage, "generator": None, "pooler": None}
        return ResidentModel(installed=installed, facts=facts, defaults_from_files={}, loaded_at=0.0, **parts)

    def close(self) -> None:
        """What `ModelLoader.close` does."""

    def alive(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if not worker.is_gone]

    async def ask(self, name: str, *, seconds: float = 1.0, blocks: int = 8, keep_alive: float | None = None) -> Lease:
        """One request, as `app.generation` makes it."""
        async with self.supervisor.serving(name, keep_alive=keep_alive) as lease:
            await cast(FakeWorker, lease.resident.worker).serve(blocks, seconds)
            return lease

    async def load_model(self, name: str, **wishes: Any) -> list[Progress]:
        return [progress async for progress in self.supervisor.load(name, **wishes)]

    def check(self) -> None:
        """The ledger adds up: with what there is, with what workers hold, and with the slots."""
        shares = [
            DeviceShare(name, total, self.others_bytes.get(name, 0), self.settings.memory_limit)
            for name, total in self.devices.items()
        ]
        self.supervisor.ledger.check(shares)
        for share in shares:
            assert self.really_held(share.name) <= self.supervisor.ledger.held_bytes(share.name), "held, not promised"
        states = {state.name: state for state in self.supervisor.states()}
        for entry in self.supervisor.ledger:
            assert states[entry.name].size_bytes == entry.held_bytes
            assert states[entry.name].device == entry.device


def fleet_of(num_models: int, *, devices: dict[str, int] | None = None, **settings: Any) -> Fleet:
    """Models "m0", "m1", ... of 2 GiB each; two of them fit the usual device."""
    models = {f"m{i}": FakeModel(f"m{i}") for i in range(num_models)}
    return Fleet(models, devices or {"cuda:0": 6 * GIB}, Settings(**settings))
