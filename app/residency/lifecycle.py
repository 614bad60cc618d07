"""`Lifecycle`: moves one model from phase to phase: loads, wakes, puts to sleep, resizes, ends.

Keeps ledger, metrics and the event log true to what workers really did, and whatever fails ends in an error for
everybody who waits.  Decides nothing: `app.residency.arranger` says what goes where, the supervisor what people
wish.  What it starts runs to its end, whoever asked for it leaves.  Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from app.metrics import Metrics
from app.residency.arithmetic.ledger import Ledger
from app.residency.arithmetic.memory import is_gpu
from app.residency.arithmetic.tenants import DeviceShare, Placement
from app.residency.events import EventKind, EventLog
from app.residency.slot import Phase, Slot
from app.residency.words import memory_name
from app.residency.workers.model_loader import LoadOrder, ModelLoader, ResidentModel
from app.settings import Settings
from engine.api.errors import EngineError, InsufficientMemory, WorkerDied
from engine.api.wire import WorkerMemory
from store.errors import StoreError
from store.space import format_bytes

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 4
"""A worker that needs more than was planned is given more, so many times."""


class Lifecycle:
    """Owns the tasks of all models of one daemon."""

    def __init__(
        self,
        settings: Settings,
        loader: ModelLoader,
        ledger: Ledger,
        events: EventLog,
        metrics: Metrics,
        changed: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._loader = loader
        self._ledger = ledger
        self._events = events
        self._metrics = metrics
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads: dict[Slot, asyncio.Task[None]] = {}
        self._endings: dict[Slot, asyncio.Task[None]] = {}

    # -- coming ----------------------------------------------------------------------------------------------------

    def start_load(self, slot: Slot, placement: Placement, device: DeviceShare) -> None:
        """Promise the memory and start the worker; returns at once.  Raises `Overdrawn`."""
        self._ledger.reserve(slot.name, device, placement.budget_bytes)
        slot.phase, slot.device, slot.failure = Phase.LOADING, device.name, ""
        slot.say("starting its worker")
        self.record(slot, "load", _why_loaded(slot, placement))
        load = self._loads[slot] = self._run(self._load(slot, placement))
        load.add_done_callback(partial(self._load_ended, slot))

    async def _load(self, slot: Slot, placement: Placement) -> None:
        order = LoadOrder(placement.device, placement.budget_bytes, slot.wishes.max_model_len)
        try:
            model = await self._loader.load(slot.installed, order, slot.report)
        except InsufficientMemory as error:
            self._forget(slot)
            if not self._wants_more(slot, placement):
                self.refuse(slot, error, f"It could not be loaded: {error.message}")
        except Exception as error:
            if not isinstance(error, (EngineError, StoreError)):
                logger.exception("%s could not be loaded", slot.name)
            self._forget(slot)
            self.refuse(slot, error, f"It could not be loaded: {getattr(error, 'message', error)}")
        else:
            self._settle(slot, model)

    def _load_ended(self, slot: Slot, load: asyncio.Task[None]) -> None:
        """Called also for a load that was broken off before it ran."""
        del self._loads[slot]
        if load.cancelled():
            self.record(slot, "unload", "It was stopped while it was loading.", size_bytes=0)
            self._forget(slot)
            slot.line.refuse(WorkerDied(f"{slot.name} was stopped while it was loading; ask again to load it anew."))
        elif load.cancelling():
            # It had come as far as its worker in the very moment that it was broken off.
            self.start_end(slot, "unload", "It was stopped while it was loading.")
        self._changed()

    def _settle(self, slot: Slot, model: ResidentModel) -> None:
        """A worker is ready: note what it holds, and let everybody in."""
        slot.model = model
        slot.load_seconds, slot.measured_bytes = model.facts.load_seconds, model.fixed_bytes
        slot.asleep_bytes = slot.host_bytes = 0
        self._ledger.correct(slot.name, model.fixed_bytes + model.kv_bytes)
        self._run(self._watch(slot, model))
        self.record(slot, "ready", f"It takes requests: {_summary(model)}.")
        slot.keep_alive_s = slot.wishes.keep_alive_s
        slot.begin_turn()

    def _wants_more(self, slot: Slot, placement: Placement) -> bool:
        """Whether to try once more with more memory, since the worker found the plan too small."""
        slot.num_attempts += 1
        if slot.need is None or slot.num_attempts >= MOST_ATTEMPTS or not slot.is_wanted:
            return False
        had = placement.budget_bytes
        fixed = max(slot.need.fixed_bytes * 3 // 2, had - placement.kv_bytes + had // 2)
        slot.need = replace(slot.need, fixed_bytes=fixed, certain_bytes=None)
        self._events.record("load", slot.name, f"It needs more than the {format_bytes(had)} that it had; it gets more.")
        return True

    async def _watch(self, slot: Slot, model: ResidentModel) -> None:
        """Clean up after a worker that failed by itself; who asks next, or waits already, gets a fresh one."""
        await model.worker.failed.wait()
        if slot.model is model and slot not in self._endings:
            slot.failure = str(model.worker.failure)
            await self.end(slot, "fail", slot.failure)
            slot.run_down()

    # -- sleeping --------------------------------------------------------------------------------------------------

    async def sleep(self, slot: Slot, why: str) -> None:
        """Move the weights to host memory.  Raises the `EngineError` of a worker that cannot and goes on as before."""
        model = slot.model
        assert model is not None
        slot.phase = Phase.FALLING_ASLEEP
        slot.say("going to sleep")
        try:
            memory = await model.worker.sleep()
        except EngineError:
            # One that has died is cleaned up after, and whoever waits for it gets a fresh one.
            if slot.phase is Phase.FALLING_ASLEEP and model.worker.failure is None:
                slot.resume_turn()
            self._changed()
            raise
        if slot.phase is not Phase.FALLING_ASLEEP:
            raise WorkerDied(f"{slot.name} ended while it was going to sleep.")
        slot.phase, slot.note = Phase.ASLEEP, ""
        # In RAM what sleeps goes on holding its device.
        in_ram = 0 if is_gpu(slot.device) else memory.host_bytes
        slot.asleep_bytes = min(memory.fixed_bytes + in_ram, self._ledger.held_by(slot.name))
        slot.host_bytes = memory.host_bytes
        self._ledger.sleep(slot.name, slot.asleep_bytes)
        self.record(slot, "sleep", why)
        slot.run_down()
        self._changed()

    def start_wake(self, slot: Slot, placement: Placement, device: DeviceShare) -> None:
        """Promise the memory and wake the worker; returns at once.  Raises `Overdrawn`."""
        self._ledger.resize(slot.name, device, placement.budget_bytes)
        slot.phase = Phase.WAKING
        slot.say("waking up")
        slot.run_down()
        why = slot.line.first.why if slot.line.first else ""
        self._run(self._wake(slot, placement, why))

    async def _wake(self, slot: Slot, placement: Placement, why: str) -> None:
        model = slot.model
        assert model is not None
        started_at = asyncio.get_running_loop().time()
        try:
            memory = await model.worker.wake(model.blocks_of(placement.kv_bytes))
        except EngineError as error:
            # What cannot wake is loaded anew, for everybody who waits.
            await self.end(slot, "fail", f"It could not be woken: {error.message}")
            return
        if slot.phase is not Phase.WAKING:
            return
        slot.asleep_bytes = slot.host_bytes = 0
        self._adopt(slot, model, memory)
        seconds = asyncio.get_running_loop().time() - started_at
        self.record(slot, "wake", f"{why} It was awake after {seconds:.1f} s.".lstrip())
        slot.begin_turn()
        self._changed()

    # -- staying ---------------------------------------------------------------------------------------------------

    async def resize(self, slot: Slot, kv_bytes: int, device: DeviceShare, why: str) -> None:
        """Give a model's KV cache `kv_bytes`, as near as its worker can come.

        Raises the `EngineError` of a worker that refused, with nothing changed, or has ended, and `Overdrawn` for what
        is not free.
        """
        model = slot.model
        if model is None:
            raise WorkerDied(f"{slot.name} has ended in this moment; try again.")
        before = model.kv_bytes
        num_blocks = model.blocks_of(kv_bytes)
        if num_blocks == model.facts.num_kv_blocks:
            return
        is_growth = num_blocks > model.facts.num_kv_blocks
        if is_growth:
            self._ledger.resize(slot.name, device, model.fixed_bytes + num_blocks * model.block_bytes)
        try:
            memory = await model.worker.resize_cache(num_blocks)
        except EngineError:
            if is_growth and slot.model is model and slot.name in self._ledger:
                self._ledger.correct(slot.name, model.fixed_bytes + before)
            raise
        if slot.model is model and slot.name in self._ledger:
            self._adopt(slot, model, memory)
            if model.kv_bytes != before:
                change = f"Its KV cache went from {format_bytes(before)} to {format_bytes(model.kv_bytes)}"
                self.record(slot, "resize", f"{change}: {why}")

    def _adopt(self, slot: Slot, model: ResidentModel, memory: WorkerMemory) -> None:
        model.adopt(memory)
        self._ledger.correct(slot.name, model.fixed_bytes + model.kv_bytes)

    # -- leaving ---------------------------------------------------------------------------------------------------

    def start_end(self, slot: Slot, kind: EventKind, why: str, *, told: str = "") -> asyncio.Task[None] | None:
        """End a model's worker, or its load, and give back what it held; None if it has neither.

        It takes no more requests from this moment on.  Open ones end with one error each, which says `told`, or why;
        whoever waits in line goes on waiting, for a worker that is loaded anew.
        """
        load = self._loads.get(slot)
        if load is not None and not load.done():
            # Only once: a second time would break off the end of its worker.
            if not load.cancelling():
                load.cancel()
            return load
        if slot not in self._endings and slot.model is not None:
            slot.phase = Phase.LEAVING
            slot.say("ending its worker")
            slot.run_down()
            self.record(slot, kind, why, size_bytes=0)
            self._endings[slot] = self._run(self._end(slot, slot.model, told or why))
        return self._endings.get(slot)

    async def end(self, slot: Slot, kind: EventKind, why: str, *, told: str = "") -> None:
        """`start_end`, and wait for the end."""
        ending = self.start_end(slot, kind, why, told=told)
        if ending is not None:
            await asyncio.wait({ending})

    async def _end(self, slot: Slot, model: ResidentModel, told: str) -> None:
        try:
            self.observe(model)
            self._metrics.forget_engine(model.name)
            await model.worker.close(self._settings.worker_stop_timeout_s, told)
        finally:
            slot.need = None
            self._forget(slot)
            del self._endings[slot]
            self._changed()

    def _forget(self, slot: Slot) -> None:
        self._ledger.release(slot.name)
        slot.phase, slot.model, slot.device, slot.note = Phase.COLD, None, "", ""
        slot.asleep_bytes = slot.host_bytes = 0
        slot.run_down()

    def refuse(self, slot: Slot, error: Exception, why: str, kind: EventKind = "fail") -> None:
        """A model that is not there cannot come: everybody who waits gets the error, and nothing is tried again."""
        slot.failure, slot.num_attempts, slot.need = why, 0, None
        self._events.record(kind, slot.name, why)
        slot.line.refuse(error)
        slot.run_down()

    async def close(self) -> None:
        """Wait for everything that is on its way, once every model has been ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def observe(self, model: ResidentModel) -> None:
        """Bring the metrics up to date with a worker's latest report."""
        current = model.worker.stats
        self._metrics.observe_engine(model.name, model.seen_stats, current)
        model.seen_stats = current

    def record(self, slot: Slot, kind: EventKind, why: str, *, size_bytes: int | None = None) -> None:
        """An event about a model, with what it holds; `size_bytes` where that is about to change."""
        size_bytes = self._ledger.held_by(slot.name) if size_bytes is None else size_bytes
        self._events.record(kind, slot.name, why, device=slot.device, size_bytes=size_bytes)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _why_loaded(slot: Slot, placement: Placement) -> str:
    why = slot.line.first.why if slot.num_attempts == 0 and slot.line.first else "It is tried once more."
    may_take = f"It may take {format_bytes(placement.budget_bytes)} of {memory_name(placement.device)}."
    return " ".join((why, *(placement.remarks or (may_take,))))


def _summary(model: ResidentModel) -> str:
    facts = model.facts
    took = f"{facts.architecture} on {facts.device}, loaded in {facts.load_seconds:.1f} s"
    if not facts.num_kv_tokens:
        return took
    return (
        f"{took}, {facts.num_kv_tokens:,} tokens of KV cache, maximum concurrency for {facts.max_model_len:,} tokens "
        f"per request {facts.max_concurrency:.2f}x"
    )
