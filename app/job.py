"""`Job`: what is known of one long operation, and `Watcher`: somebody who follows it.

Both belong to the event loop's thread and do nothing of their own accord; `app.jobs` moves them on.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from app.schema.admin import PullRequest
from app.transfer_rate import RateMeter
from store.progress import PullProgress

JobState = Literal["queued", "running", "paused", "done", "failed", "cancelled"]


@dataclass(eq=False, slots=True)
class Run:
    """One attempt at a job, in a thread of its own; `ended` is set when that thread has let go of everything."""

    stop: threading.Event = field(default_factory=threading.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Watcher:
    """What one follower has not read yet: of every file only the newest count, so a slow reader costs no memory."""

    def __init__(self, *, holds: bool) -> None:
        self.holds = holds
        """The job goes on for this watcher: without it and its like it pauses, unless it is detached."""
        self._unread: dict[str, PullProgress] = {}
        self._has_ended = False
        self._outcome: Exception | None = None
        self._changed = asyncio.Event()

    def tell(self, progress: PullProgress) -> None:
        key = _key(progress)
        # To the end: the counts of the whole then never go back.
        self._unread.pop(key, None)
        self._unread[key] = progress
        self._changed.set()

    def end(self, outcome: Exception | None) -> None:
        """Nothing follows; `outcome` is why the job did not reach its end."""
        self._has_ended, self._outcome = True, outcome
        self._changed.set()

    async def reports(self) -> AsyncGenerator[PullProgress, None]:
        """Everything until the end; raises the outcome."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            unread, self._unread = self._unread, {}
            for progress in unread.values():
                yield progress
            if self._has_ended and not self._unread:
                break
        if self._outcome is not None:
            raise self._outcome


@dataclass(eq=False, slots=True)
class Job:
    """One operation on one model; times are in seconds since the epoch.

    `request.model` is the model's name as `parse_model_name` writes it.  A detached job goes on with nobody watching.
    """

    request: PullRequest
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    is_detached: bool = False
    created_at: float = field(default_factory=time.time)
    state: JobState = "queued"
    status: str = ""
    total_bytes: int = 0
    done_bytes: int = 0
    error: Exception | None = None
    started_at: float | None = None
    ended_at: float | None = None
    files: dict[str, PullProgress] = field(default_factory=dict)
    rate: RateMeter = field(default_factory=RateMeter)
    watchers: set[Watcher] = field(default_factory=set)
    run: Run | None = None

    @property
    def is_active(self) -> bool:
        return self.state in ("queued", "running")

    @property
    def is_held(self) -> bool:
        """Whether somebody wants it to go on."""
        return self.is_detached or any(watcher.holds for watcher in self.watchers)

    def enter_queue(self, request: PullRequest, *, is_detached: bool) -> None:
        """Forget what an earlier run came to; counts stay until the next run has its own."""
        self.request, self.is_detached = request, is_detached
        self.state, self.status, self.error = "queued", "", None
        self.ended_at = None

    def begin(self, run: Run) -> None:
        self.run, self.state = run, "running"
        self.started_at = time.time()
        self.files.clear()
        self.rate = RateMeter()

    def note(self, progress: PullProgress) -> None:
        """Take in a report and pass it on."""
        if progress.file is None or not progress.total_bytes:
            self.status = progress.status
        else:
            self.files[progress.file] = progress
        if progress.all_total_bytes:
            self.total_bytes, self.done_bytes = progress.all_total_bytes, progress.all_done_bytes
            self.rate.add(self.done_bytes)
        for watcher in self.watchers:
            watcher.tell(progress)

    def end(self, state: JobState, outcome: Exception | None = None) -> None:
        """Leave the queue or the running ones; every watcher's stream ends with `outcome`."""
        self.state = state
        self.error = outcome if state == "failed" else None
        self.ended_at = time.time()
        if self.run is not None:
            self.run.stop.set()
        for watcher in self.watchers:
            watcher.end(outcome)

    def watch(self, *, holds: bool) -> Watcher:
        """A new watcher, who first reads what is known already."""
        watcher = Watcher(holds=holds)
        self.watchers.add(watcher)
        if self.is_active and self.status:
            watcher.tell(PullProgress(self.status))
        for progress in self.files.values():
            whole = {"all_total_bytes": self.total_bytes, "all_done_bytes": self.done_bytes}
            watcher.tell(msgspec.structs.replace(progress, **whole))
        return watcher


def _key(progress: PullProgress) -> str:
    return f"status {progress.status}" if progress.file is None else f"file {progress.file}"
