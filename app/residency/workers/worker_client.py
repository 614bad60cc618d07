"""`WorkerClient`: the daemon's end of the socket to one worker process.

Starts the process, sends `Start`, and then moves prompts in and step outputs out: outputs
of one `submit` arrive in one mailbox.  Calls about the worker's memory are answered one by one.
Knows token ids only.  Whatever ends the worker, each sequence that is still open gets exactly
one terminal output, and each call one error; a worker that says nothing for long while it has work
counts as dead.  Used by `app.residency.workers.model_loader` and `lifecycle` (life), `app.generation` and
`app.pooling` (work).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from app.residency.workers.step_mailbox import StepMailbox
from app.residency.workers.worker_process import WorkerProcess
from engine.api import wire
from engine.api.config import EngineConfig
from engine.api.errors import BrokenCheckpoint, EngineError, InsufficientMemory, UnsupportedModel, WorkerDied
from engine.api.output import StepOutput
from engine.api.request import Prompt

logger = logging.getLogger(__name__)

_MAX_SOCKET_PATH_BYTES = 100
"""Linux allows 107; some is left for the name within the directory."""
_LAST_FRAMES_S = 0.1
MOST_SILENCE_S = 900.0
"""A worker with open sequences reports every second, or after a step that takes longer; none takes as long as this."""
CALL_TIMEOUT_S = 120.0
"""A step in flight and page-locking a hundred gigabytes take less; a worker that takes longer hangs."""
_WORKER_ERRORS: dict[str, type[EngineError]] = {
    error.code: error for error in (UnsupportedModel, BrokenCheckpoint, InsufficientMemory)
}

OnProgress = Callable[[wire.Progress], None]


class WorkerClient:
    """One worker; `failure` is set once it can do no more work."""

    def __init__(self, context: zmq.asyncio.Context, runtime_dir: Path) -> None:
        self._socket_dir = _socket_directory(runtime_dir)
        self.endpoint = f"ipc://{self._socket_dir.name}/s"
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(self.endpoint)
        self._process: WorkerProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[wire.WorkerFacts] = asyncio.get_running_loop().create_future()
        self._outputs: dict[int, StepMailbox] = {}
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[wire.WorkerMemory]] = {}
        self._call_ids = itertools.count(1)
        self._on_progress: OnProgress = lambda progress: None
        self._heard_at = 0.0
        self._silence_check: asyncio.TimerHandle | None = None
        self.stats = wire.EngineStats()
        self.failure: EngineError | None = None
        self.failed = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def _is_ready(self) -> bool:
        return self._ready.done() and self._ready.exception() is None

    async def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        config: EngineConfig,
        *,
        timeout_s: float,
        on_progress: OnProgress,
    ) -> wire.WorkerFacts:
        """Spawn the worker and wait until it has produced a first token.

        Raises the worker's own error, or `WorkerDied`; the caller must `close` in any case.
        """
        self._on_progress = on_progress
        self._process = await WorkerProcess.spawn([*command, "--connect", self.endpoint], environment, log_path)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch(self._process))]
        self._send(wire.Start(wire.WIRE_VERSION, config))
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            raise WorkerDied(
                f"The model was not ready within {timeout_s:.0f} s; see {log_path}, or raise worker_start_timeout_s."
            ) from None

    def next_sequence_id(self) -> int:
        """A new id, unique for the life of this worker; safe to call from any thread."""
        return next(self._ids)

    def submit(self, prompts: Sequence[Prompt], mailbox: StepMailbox | None = None) -> StepMailbox:
        """Send prompts; all their outputs come through the returned mailbox, which is `mailbox` if that is given."""
        if self.failure is not None:
            raise self.failure
        mailbox = StepMailbox() if mailbox is None else mailbox
        self._expect_reports()
        self._outputs.update((prompt.sequence_id, mailbox) for prompt in prompts)
        self._send(wire.Submit(tuple(prompts)))
        return mailbox

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Drop sequences; nothing more comes for them.  Does not wait, so a cancelled task may call it."""
        open_ids = tuple(one for one in sequence_ids if self._outputs.pop(one, None) is not None)
        if open_ids and self.failure is None:
            self._send(wire.Abort(open_ids))

    async def resize_cache(self, num_blocks: int) -> wire.WorkerMemory:
        """Let the KV cache grow or shrink to `num_blocks`, as near as the worker can; returns what it holds then.

        Raises, as `sleep` and `wake` do, the `EngineError` of a worker that refused and changed nothing, or
        `WorkerDied`; a worker that does not answer within `CALL_TIMEOUT_S` counts as dead.
        """
        return await self._call(wire.ResizeCache(next(self._call_ids), num_blocks))

    async def sleep(self) -> wire.WorkerMemory:
        """Let the worker give its device's memory back; refused while sequences are open."""
        return await self._call(wire.Sleep(next(self._call_ids)))

    async def wake(self, num_blocks: int) -> wire.WorkerMemory:
        """Bring a sleeping worker back, with a KV cache of `num_blocks`."""
        return await self._call(wire.Wake(next(self._call_ids), num_blocks))

    async def close(self, timeout_s: float, reason: str = "The model was stopped.") -> None:
        """End the worker: ask, then terminate, then kill; open sequences end with `reason`."""
        if self._is_ready and self.failure is None:
            self._send(wire.Shutdown())
        self._fail(WorkerDied(reason))
        if self._silence_check is not None:
            self._silence_check.cancel()
        if self._process is not None:
            # While it loads it does not look at the socket, and nobody waits for it any more.
            await self._process.stop(timeout_s if self._is_ready else 0.0, timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=0)
        self._socket_dir.cleanup()

    async def _call(self, frame: wire.ResizeCache | wire.Sleep | wire.Wake) -> wire.WorkerMemory:
        if self.failure is not None:
            raise self.failure
        answer = self._calls[frame.call_id] = asyncio.get_running_loop().create_future()
        self._send(frame)
        try:
            # Shielded: what the worker does cannot be called back, so a caller that leaves changes nothing.
            return await asyncio.wait_for(asyncio.shield(answer), CALL_TIMEOUT_S)
        except TimeoutError:
            error = WorkerDied(f"The model's worker process did not answer for {CALL_TIMEOUT_S:.0f} s; try again.")
            self._fail(error)
            raise error from None
        finally:
            del self._calls[frame.call_id]

    def _send(self, frame: wire.ToWorker) -> None:
        # PAIR without a high-water mark: the frame is queued in libzmq at once, so the future
        # that pyzmq returns needs no waiting for.
        self._socket.send(wire.encode(frame))

    async def _read(self) -> None:
        while True:
            frame = wire.decode_from_worker(await self._socket.recv())
            self._heard_at = asyncio.get_running_loop().time()
            self._dispatch(frame)

    def _expect_reports(self) -> None:
        """From now on the worker has work, and must not be silent for long."""
        loop = asyncio.get_running_loop()
        if not self._outputs:
            self._heard_at = loop.time()
        if self._silence_check is None:
            self._silence_check = loop.call_later(MOST_SILENCE_S, self._check_silence)

    def _check_silence(self) -> None:
        """End a worker that is stuck; one that is idle is not looked after until it has work again."""
        self._silence_check = None
        if not self._outputs or self.failure is not None:
            return
        loop = asyncio.get_running_loop()
        left_s = self._heard_at + MOST_SILENCE_S - loop.time()
        if left_s > 0:
            self._silence_check = loop.call_later(left_s, self._check_silence)
        else:
            minutes = MOST_SILENCE_S / 60
            self._fail(WorkerDied(f"The model's worker process has said nothing for {minutes:.0f} minutes; try again."))

    def _dispatch(self, frame: wire.FromWorker) -> None:
        match frame:
            case wire.Steps():
                self.stats = frame.stats
                for output in frame.outputs:
                    self._deliver(output)
            case wire.Progress():
                self._on_progress(frame)
            case wire.Ready():
                if not self._ready.done():
                    self._see_blocks(frame.facts.num_kv_blocks)
                    self._ready.set_result(frame.facts)
            case wire.Memory():
                self._see_blocks(frame.memory.num_kv_blocks)
                if (call := self._calls.get(frame.call_id)) is not None and not call.done():
                    call.set_result(frame.memory)
            case wire.Refused():
                if (call := self._calls.get(frame.call_id)) is not None and not call.done():
                    call.set_exception(_WORKER_ERRORS.get(frame.code, EngineError)(frame.message))
            case wire.Fatal():
                self._fail(_WORKER_ERRORS.get(frame.code, EngineError)(frame.message))

    def _see_blocks(self, num_blocks: int) -> None:
        """Until the next step's report: the cache has so many blocks, and as many in use as before."""
        num_used = self.stats.num_blocks - self.stats.num_free_blocks
        self.stats = msgspec.structs.replace(
            self.stats, num_blocks=num_blocks, num_free_blocks=max(0, num_blocks - num_used)
        )

    def _deliver(self, output: StepOutput) -> None:
        is_terminal = output.finish_reason is not None
        mailbox = self._outputs.pop(output.sequence_id, None) if is_terminal else self._outputs.get(output.sequence_id)
        if mailbox is not None:
            mailbox.put(output)

    async def _watch(self, process: WorkerProcess) -> None:
        ending = await process.wait()
        # Its last frames, a `Fatal` above all, may still be on their way through the socket.
        await asyncio.sleep(_LAST_FRAMES_S)
        if self.failure is None:
            logger.error("Worker %d ended unexpectedly (%s); its log: %s", process.pid, ending, process.log_path)
        self._fail(WorkerDied(f"The model's worker process ended ({ending}); try again, and see {process.log_path}."))

    def _fail(self, error: EngineError) -> None:
        """End everything that is open with `error`; the first call decides."""
        if self.failure is not None:
            return
        self.failure = error
        self.failed.set()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()
        for sequence_id in tuple(self._outputs):
            self._deliver(StepOutput(sequence_id, finish_reason="error", error_message=error.message))
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
                # Its caller may have left.
                call.exception()


def _socket_directory(runtime_dir: Path) -> tempfile.TemporaryDirectory[str]:
    """A private directory whose path is short enough for a UNIX socket."""
    directory = tempfile.TemporaryDirectory(prefix="w", dir=runtime_dir)
    if len(directory.name.encode()) < _MAX_SOCKET_PATH_BYTES:
        return directory
    directory.cleanup()
    return tempfile.TemporaryDirectory(prefix="quire-")
