"""`Supervisor`: which models are resident, and bringing in the one a request names.

Loads one model at a time; requests for the same cold model share one load, and requests
for resident ones go on meanwhile.  Makes room by stopping the least recently used idle
model.  Knows no HTTP and no text; called by `app.generation` and the admin routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from app.errors import ShuttingDown
from app.metrics import Metrics
from app.residency.acceptance import why_unsupported
from app.residency.memory import DeviceMemory, declared_bytes, least_needed_bytes, worker_budget_bytes
from app.residency.model_loader import ModelLoader, ResidentModel
from app.settings import Settings
from engine.api.errors import InsufficientMemory, UnsupportedModel, WorkerDied
from engine.api.wire import Progress
from store.facts import ModelFacts
from store.models import InstalledModel

logger = logging.getLogger(__name__)

GIB = 2**30
SHUTDOWN_GRACE_S = 3.0


class Load:
    """A load under way, with everyone who wants to hear of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.task: asyncio.Task[None] | None = None
        self.listeners: set[asyncio.Queue[Progress | None]] = set()

    def report(self, progress: Progress | None) -> None:
        for listener in self.listeners:
            listener.put_nowait(progress)

    async def wait(self) -> None:
        """Wait for the end; raises what the load raised.  Being cancelled here does not stop the load."""
        assert self.task is not None
        await asyncio.wait({self.task})
        if self.task.cancelled():
            raise WorkerDied(f"{self.name} was stopped while it was loading.")
        self.task.result()


class Supervisor:
    """Owns all resident models of one daemon; lives on its event loop."""

    def __init__(
        self,
        settings: Settings,
        loader: ModelLoader,
        metrics: Metrics,
        *,
        find_model: Callable[[str], InstalledModel],
        read_facts: Callable[[Path], ModelFacts],
        measure_memory: Callable[[str], DeviceMemory],
    ) -> None:
        self._settings = settings
        self._loader = loader
        self._metrics = metrics
        self._find_model = find_model
        self._read_facts = read_facts
        self._measure_memory = measure_memory
        self._residents: dict[str, ResidentModel] = {}
        self._loads: dict[str, Load] = {}
        self._canonical_names: dict[str, str] = {}
        self._load_lock = asyncio.Lock()
        self._watchers: set[asyncio.Task[None]] = set()
        self._is_closing = False

    @property
    def residents(self) -> tuple[ResidentModel, ...]:
        return tuple(self._residents.values())

    @property
    def loading(self) -> tuple[str, ...]:
        return tuple(self._loads)

    async def acquire(self, name: str) -> ResidentModel:
        """The resident model of this name or alias, loaded if need be.

        Use it before waiting for anything else: an idle model may be stopped at any time.
        """
        while True:
            resident = self._resident(name)
            if resident is not None:
                return resident
            load = await self._join_load(name)
            if load is not None:
                await load.wait()

    async def load(self, name: str) -> AsyncGenerator[Progress, None]:
        """Load a model and yield progress until it is ready."""
        load = None if self._resident(name) else await self._join_load(name)
        if load is None:
            return
        listener: asyncio.Queue[Progress | None] = asyncio.Queue()
        load.listeners.add(listener)
        try:
            while (progress := await listener.get()) is not None:
                yield progress
        finally:
            load.listeners.discard(listener)
        await load.wait()

    async def stop(self, name: str) -> bool:
        """Stop a model, loading or resident; its open requests end with one error each."""
        installed = self._resident(name)
        key = installed.name if installed else (await asyncio.to_thread(self._find_model, name)).name
        load = self._loads.get(key)
        if load is not None and load.task is not None:
            load.task.cancel()
            await asyncio.wait({load.task})
        resident = self._residents.get(key)
        if resident is not None:
            await self._unload(resident, f"The model {key} was stopped.")
        return load is not None or resident is not None

    def is_resident(self, key: str) -> bool:
        """Whether the model of this canonical name is loaded or being loaded."""
        return key in self._residents or key in self._loads

    def observe_stats(self) -> None:
        """Bring the metrics up to date with every worker's latest report."""
        for resident in self._residents.values():
            self._observe(resident)

    async def close(self, grace_s: float = SHUTDOWN_GRACE_S) -> None:
        """Stop everything, loads included; open requests have `grace_s` to finish, then end with one error each."""
        self._is_closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                for resident in self.residents:
                    await resident.generator.idle.wait()
        loads = [load.task for load in self._loads.values() if load.task is not None]
        for task in loads:
            task.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        reason = "The daemon is shutting down."
        await asyncio.gather(*(self._unload(resident, reason) for resident in self.residents))
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._loader.close()

    def _resident(self, name: str) -> ResidentModel | None:
        resident = self._residents.get(self._canonical_names.get(name, name))
        return resident if resident is not None and resident.worker.failure is None else None

    async def _join_load(self, name: str) -> Load | None:
        """The load of this model, started if there is none; None if it just became resident."""
        installed = await asyncio.to_thread(self._find_model, name)
        self._canonical_names[name] = installed.name
        if self._is_closing:
            raise ShuttingDown("The daemon is shutting down; start it again and repeat the request.")
        if self._resident(installed.name) is not None:
            return None
        load = self._loads.get(installed.name)
        if load is None:
            load = self._loads[installed.name] = Load(installed.name)
            load.task = asyncio.create_task(self._load(installed, load))
            # Everyone who waited may have left; a failure is logged where it happens.
            load.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return load

    async def _load(self, installed: InstalledModel, load: Load) -> None:
        try:
            async with self._load_lock:
                resident = await self._load_with_room(installed, load)
                self._residents[installed.name] = resident
            watcher = asyncio.create_task(self._watch(resident))
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)
            logger.info("%s is ready: %s", installed.name, _summary(resident))
        except Exception as error:
            logger.error("%s could not be loaded: %s", installed.name, error)
            raise
        finally:
            del self._loads[installed.name]
            load.report(None)

    async def _load_with_room(self, installed: InstalledModel, load: Load) -> ResidentModel:
        facts = await asyncio.to_thread(self._read_facts, installed.path)
        if reason := why_unsupported(facts):
            raise UnsupportedModel(reason)
        while True:
            budget_bytes = await self._make_room(installed, facts)
            logger.info("Loading %s within %.2f GiB", installed.name, budget_bytes / GIB)
            try:
                return await self._loader.load(installed, budget_bytes, load.report)
            except InsufficientMemory:
                if not await self._evict_one():
                    raise

    async def _make_room(self, installed: InstalledModel, facts: ModelFacts) -> int:
        """The memory budget in bytes of a new worker, after stopping as many idle models as that takes."""
        while True:
            memory = await asyncio.to_thread(self._measure_memory, self._settings.device)
            needed_bytes = least_needed_bytes(facts, memory.device, self._settings.quantization)
            declared = [declared_bytes(resident.facts) for resident in self._residents.values()]
            budget_bytes = worker_budget_bytes(memory, self._settings.gpu_memory_utilization, declared)
            if budget_bytes >= needed_bytes:
                return budget_bytes
            if not await self._evict_one():
                raise InsufficientMemory(
                    f"{installed.name} needs at least {needed_bytes / GIB:.2f} GiB of {memory.device} but only "
                    f"{max(0, budget_bytes) / GIB:.2f} GiB are left for it; stop a model or another program, or "
                    "choose a smaller model."
                )

    async def _evict_one(self) -> bool:
        """Stop the idle model that was used least recently; false if none is idle."""
        idle = [resident for resident in self._residents.values() if resident.is_idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda resident: resident.generator.last_used_at)
        logger.info("Stopping %s to make room", oldest.name)
        await self._unload(oldest, f"The model {oldest.name} was stopped to make room for another.")
        return True

    async def _watch(self, resident: ResidentModel) -> None:
        """Clean up after a worker that failed by itself; the next request then loads a fresh one."""
        await resident.worker.failed.wait()
        if self._residents.get(resident.name) is resident:
            logger.error("%s is no longer resident: %s", resident.name, resident.worker.failure)
            await self._unload(resident, str(resident.worker.failure))

    async def _unload(self, resident: ResidentModel, reason: str) -> None:
        if self._residents.get(resident.name) is resident:
            del self._residents[resident.name]
            self._observe(resident)
            self._metrics.forget_engine(resident.name)
            await resident.worker.close(self._settings.worker_stop_timeout_s, reason)

    def _observe(self, resident: ResidentModel) -> None:
        current = resident.worker.stats
        self._metrics.observe_engine(resident.name, resident.seen_stats, current)
        resident.seen_stats = current


def _summary(resident: ResidentModel) -> str:
    facts = resident.facts
    return (
        f"{facts.architecture} on {facts.device}, {facts.num_kv_tokens:,} tokens of KV cache, maximum concurrency "
        f"for {facts.max_model_len:,} tokens per request {facts.max_concurrency:.2f}x, "
        f"loaded in {facts.load_seconds:.1f} s"
    )
