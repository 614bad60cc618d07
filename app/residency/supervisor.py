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
from app.residency.model_loader import ModelLoader, ResidentModel, worker_key
from app.settings import Settings
from engine.api.errors import InsufficientMemory, UnsupportedModel, WorkerDied
from engine.api.wire import Progress
from store.facts import ModelFacts
from store.models import InstalledModel

logger = logging.getLogger(__name__)

GIB = 2**30
SHUTDOWN_GRACE_S = 3.0


_WorkerKey = tuple[Path, int | None]


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
            raise WorkerDied(f"{self.name} was stopped while it was loading; ask again to load it anew.")
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
        self._residents: dict[_WorkerKey, ResidentModel] = {}
        self._loads: dict[_WorkerKey, Load] = {}
        self._installed: dict[str, InstalledModel] = {}
        self._load_lock = asyncio.Lock()
        self._watchers: set[asyncio.Task[None]] = set()
        self._is_closing = False

    @property
    def residents(self) -> tuple[ResidentModel, ...]:
        return tuple(self._residents.values())

    @property
    def loading(self) -> tuple[str, ...]:
        return tuple(load.name for load in self._loads.values())

    async def acquire(self, name: str) -> tuple[ResidentModel, InstalledModel]:
        """The resident model that answers for this name or alias, loaded if need be, and what it is to be there.

        Use it before waiting for anything else: an idle model may be stopped at any time.
        """
        while True:
            served = self._served(name)
            if served is not None:
                return served
            load = await self._join_load(name)
            if load is not None:
                await load.wait()

    async def load(self, name: str) -> AsyncGenerator[Progress, None]:
        """Load a model and yield progress until it is ready."""
        load = None if self._served(name) else await self._join_load(name)
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
        """Stop a model, loading or resident; its open requests end with one error each.

        A worker that answers for other names too goes on, and so do its requests.
        """
        # A model whose files are gone can still be stopped.
        known = (model for asked, model in self._installed.items() if name in (asked, model.name))
        installed = next(known, None)
        if installed is None:
            installed = await asyncio.to_thread(self._find_model, name)
        key, name = worker_key(installed), installed.name
        self._installed = {asked: model for asked, model in self._installed.items() if model.name != name}
        load = self._loads.get(key)
        if load is not None and load.task is not None and load.name == name:
            load.task.cancel()
            await asyncio.wait({load.task})
            return True
        resident = self._residents.get(key)
        if resident is None or name not in resident.names:
            return False
        if resident.names == [name]:
            await self._unload(resident, f"The model {name} was stopped; ask again to load it anew.")
        else:
            resident.names.remove(name)
        return True

    def is_resident(self, name: str) -> bool:
        """Whether the model of this canonical name is loaded or being loaded."""
        return name in self.loading or any(name in resident.names for resident in self.residents)

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
                    await resident.open_requests.idle.wait()
        loads = [load.task for load in self._loads.values() if load.task is not None]
        for task in loads:
            task.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        reason = "The daemon is shutting down."
        await asyncio.gather(*(self._unload(resident, reason) for resident in self.residents))
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._loader.close()

    def _served(self, name: str) -> tuple[ResidentModel, InstalledModel] | None:
        """Who answers for a name that was asked for before, if it is resident."""
        installed = self._installed.get(name)
        resident = self._residents.get(worker_key(installed)) if installed else None
        if installed is None or resident is None or resident.worker.failure is not None:
            return None
        return (resident, installed) if installed.name in resident.names else None

    async def _join_load(self, name: str) -> Load | None:
        """The load of this model, started if there is none; None if it just became resident."""
        installed = await asyncio.to_thread(self._find_model, name)
        self._installed[name] = installed
        if self._is_closing:
            raise ShuttingDown("The daemon is shutting down; start it again and repeat the request.")
        key = worker_key(installed)
        resident = self._residents.get(key)
        if resident is not None and resident.worker.failure is None:
            if installed.name not in resident.names:
                resident.names.append(installed.name)
            return None
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = Load(installed.name)
            load.task = asyncio.create_task(self._load(installed, load))
            # Everyone who waited may have left; a failure is logged where it happens.
            load.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return load

    async def _load(self, installed: InstalledModel, load: Load) -> None:
        try:
            async with self._load_lock:
                resident = await self._load_with_room(installed, load)
                self._residents[worker_key(installed)] = resident
            watcher = asyncio.create_task(self._watch(resident))
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)
            logger.info("%s is ready: %s", installed.name, _summary(resident))
        except Exception as error:
            logger.error("%s could not be loaded: %s", installed.name, error)
            raise
        finally:
            del self._loads[worker_key(installed)]
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
            budget_bytes = worker_budget_bytes(memory, self._settings.memory_limit, declared)
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
        oldest = min(idle, key=lambda resident: resident.open_requests.last_used_at)
        logger.info("Stopping %s to make room", oldest.name)
        await self._unload(oldest, f"The model {oldest.name} was stopped to make room for another; ask again.")
        return True

    async def _watch(self, resident: ResidentModel) -> None:
        """Clean up after a worker that failed by itself; the next request then loads a fresh one."""
        await resident.worker.failed.wait()
        if self._residents.get(worker_key(resident.installed)) is resident:
            logger.error("%s is no longer resident: %s", resident.name, resident.worker.failure)
            await self._unload(resident, str(resident.worker.failure))

    async def _unload(self, resident: ResidentModel, reason: str) -> None:
        key = worker_key(resident.installed)
        if self._residents.get(key) is resident:
            del self._residents[key]
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
