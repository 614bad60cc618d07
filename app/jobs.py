"""`Jobs`: long operations that belong to the daemon, not to whoever asked for them.

One model has one job, however many clients want it.  A few run at a time, each in a thread of its
own since it may take hours; the others wait in order.  Unfinished ones are noted in a journal and
come back as paused ones after a restart.  Everything here runs on the event loop's thread, except
the operation itself.  Called by `app.api.jobs` and `app.api.admin`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

import msgspec

from app.errors import AppError, JobNotFound, JobStopped, ShuttingDown
from app.job import Job, JobState, Run
from app.job_journal import JobJournal, SavedJob
from app.schema.admin import PullRequest
from engine.api.errors import EngineError
from store.errors import StoreError
from store.models import InstalledModel
from store.names import parse_model_name
from store.progress import CancelCheck, ProgressCallback, PullProgress

logger = logging.getLogger(__name__)

PullModel = Callable[[PullRequest, ProgressCallback, CancelCheck], InstalledModel]
"""`store.pull.pull` with the daemon's data root and hub settings already filled in."""

MAX_RUNNING = 3
MAX_ENDED = 32
"""Done, failed and cancelled jobs that are still listed."""
_NOTE_INTERVAL_S = 5.0
_LET_GO_TIMEOUT_S = 5.0


class Jobs:
    """The jobs of this daemon, by id."""

    def __init__(self, pull: PullModel, journal: JobJournal, *, max_running: int = MAX_RUNNING) -> None:
        self._pull = pull
        self._journal = journal
        self._max_running = max_running
        self._jobs = {saved.id: _restored(saved) for saved in journal.read()}
        self._queue: list[Job] = []
        self._is_draining = False
        self._noted_s = 0.0

    def list(self) -> tuple[Job, ...]:
        """The oldest first."""
        return tuple(self._jobs.values())

    def find(self, job_id: str) -> Job:
        """Raises JobNotFound."""
        job = self._jobs.get(job_id)
        if job is None:
            raise JobNotFound(f"There is no job {job_id}; `quire jobs` lists those that there are.")
        return job

    def start(self, request: PullRequest, *, is_detached: bool = False, is_here: bool = False) -> Job:
        """The job that brings this model: the one that is at it, one that goes on, or a new one.

        A job that is at it keeps its options, but stays once somebody wants it detached.  What `is_here` already waits
        for nothing.  Raises InvalidName, ShuttingDown.
        """
        if self._is_draining:
            raise ShuttingDown("The daemon is stopping; pull again when it has started anew.")
        name = parse_model_name(request.model)
        request = msgspec.structs.replace(request, model=name.text)
        job = next((each for each in self._jobs.values() if _is_same(each.request.model, name.text)), None)
        if job is not None and job.is_active:
            if is_detached and not job.is_detached:
                job.is_detached = True
                self._note()
            return job
        if job is None or job.state == "done":
            if job is not None:
                del self._jobs[job.id]
            job = Job(request)
            self._jobs[job.id] = job
        if is_here:
            job.enter_queue(request, is_detached=is_detached)
            self._end(job, "done")
        else:
            self._enqueue(job, request, is_detached=is_detached)
        return job

    def resume(self, job: Job) -> None:
        """Go on with a job that stopped, with its own options and with nobody watching.  Raises ShuttingDown."""
        if job.state not in ("queued", "running", "done"):
            self.start(job.request, is_detached=True)

    async def watch(self, job: Job, *, holds: bool) -> AsyncGenerator[PullProgress, None]:
        """Reports of the job from what is known to its end; a job that nobody holds any more is paused.

        Raises what the job failed with, JobStopped when it was paused or cancelled, ShuttingDown.
        """
        watcher = job.watch(holds=holds)
        if not job.is_active:
            watcher.end(job.error or _outcome(job))
        try:
            async with aclosing(watcher.reports()) as reports:
                async for progress in reports:
                    yield progress
        finally:
            job.watchers.discard(watcher)
            if job.is_active and not job.is_held:
                self.pause(job)

    def pause(self, job: Job) -> None:
        """Stop it for now; what has arrived is kept.  Nothing happens to a job that is not active."""
        if job.is_active:
            self._end(job, "paused")

    async def cancel(self, job: Job) -> None:
        """Stop it for good, or take it off the list if it ended; returns when nobody writes its files any more."""
        if job.state in ("done", "failed", "cancelled"):
            self._jobs.pop(job.id, None)
        else:
            self._end(job, "cancelled")
        await _let_go([job])

    def forget(self, model: str) -> None:
        """The model's files were deleted: there is nothing to go on with."""
        for job in self.list():
            if not job.is_active and _is_same(job.request.model, model):
                del self._jobs[job.id]
        self._note()

    async def drain(self) -> None:
        """Take no more work and end every stream; what is unfinished is paused until the next daemon."""
        self._is_draining = True
        active = [job for job in self._jobs.values() if job.is_active]
        for job in active:
            self._end(job, "paused")
        await _let_go(active)

    def _enqueue(self, job: Job, request: PullRequest, *, is_detached: bool) -> None:
        job.enter_queue(request, is_detached=is_detached)
        self._queue.append(job)
        self._advance()
        if job.state == "queued":
            job.note(PullProgress(f"waiting until one of {self._max_running} other downloads has ended"))
        self._note()

    def _advance(self) -> None:
        """Begin as many of the waiting jobs as may run."""
        num_running = sum(job.state == "running" for job in self._jobs.values())
        while self._queue and num_running < self._max_running and not self._is_draining:
            self._begin(self._queue.pop(0))
            num_running += 1

    def _begin(self, job: Job) -> None:
        run = Run()
        job.begin(run)
        arguments = (asyncio.get_running_loop(), job, run, job.request)
        threading.Thread(target=self._work, args=arguments, name=f"pull {job.request.model}", daemon=True).start()

    def _work(self, loop: asyncio.AbstractEventLoop, job: Job, run: Run, request: PullRequest) -> None:
        """The thread of one run; all that it learns is told to the loop, which may be gone by now."""

        def tell(call: Callable[..., None], *arguments: object) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(call, *arguments)

        error: Exception | None = None
        try:
            self._pull(request, lambda progress: tell(self._report, job, run, progress), run.stop.is_set)
        except Exception as failure:  # noqa: BLE001  # the edge of a thread: whatever it is belongs to the job
            error = failure
        tell(self._ended, job, run, error)

    def _report(self, job: Job, run: Run, progress: PullProgress) -> None:
        if job.run is run and job.state == "running":
            job.note(progress)
            if time.monotonic() - self._noted_s > _NOTE_INTERVAL_S:
                self._note()

    def _ended(self, job: Job, run: Run, error: Exception | None) -> None:
        run.ended.set()
        if job.run is not run or job.state != "running":
            return
        if error is None:
            self._end(job, "done")
            return
        if not isinstance(error, AppError | EngineError | StoreError):
            logger.error("Unexpected error while pulling %s", job.request.model, exc_info=error)
            error = AppError("Something went wrong inside the daemon; its log has the details.")
        self._end(job, "failed", error)

    def _end(self, job: Job, state: JobState, error: Exception | None = None) -> None:
        if job in self._queue:
            self._queue.remove(job)
        job.state = state
        outcome = ShuttingDown(_stopped(job, "stopped with the daemon")) if self._is_draining else _outcome(job)
        job.end(state, error or outcome)
        ended = [each for each in self._jobs.values() if each.state in ("done", "failed", "cancelled")]
        for oldest in sorted(ended, key=lambda each: each.ended_at or 0.0)[:-MAX_ENDED]:
            del self._jobs[oldest.id]
        self._advance()
        self._note()

    def _note(self) -> None:
        self._noted_s = time.monotonic()
        self._journal.write([_saved(job) for job in self._jobs.values() if job.is_active or job.state == "paused"])


def _outcome(job: Job) -> JobStopped | None:
    """What the streams of a job end with that was stopped."""
    if job.state == "paused":
        return JobStopped(_stopped(job, "was paused"))
    return JobStopped(_stopped(job, "was cancelled")) if job.state == "cancelled" else None


def _stopped(job: Job, what: str) -> str:
    model = job.request.model
    return f"The download of {model} {what}; what has arrived is kept, and `quire pull {model}` goes on from there."


async def _let_go(jobs: list[Job]) -> None:
    """Wait until the threads of stopped jobs have closed their files; one that hangs is not waited for."""
    waits = [asyncio.create_task(job.run.ended.wait()) for job in jobs if job.run is not None]
    if waits:
        _, hanging = await asyncio.wait(waits, timeout=_LET_GO_TIMEOUT_S)
        for wait in hanging:
            wait.cancel()


def _is_same(model: str, other: str) -> bool:
    """Paths are told apart by case, names are not."""
    return model == other or (parse_model_name(other).kind != "path" and model.casefold() == other.casefold())


def _saved(job: Job) -> SavedJob:
    return SavedJob(
        id=job.id,
        request=job.request,
        is_detached=job.is_detached,
        created_at=job.created_at,
        total_bytes=job.total_bytes,
        done_bytes=job.done_bytes,
    )


def _restored(saved: SavedJob) -> Job:
    return Job(
        saved.request,
        id=saved.id,
        is_detached=saved.is_detached,
        created_at=saved.created_at,
        state="paused",
        total_bytes=saved.total_bytes,
        done_bytes=saved.done_bytes,
    )
