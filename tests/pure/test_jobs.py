"""Jobs with a pull that does what the test says: order, followers, failures, the journal."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from app.errors import AppError, JobNotFound, JobStopped, ShuttingDown
from app.job import Job, Watcher
from app.job_journal import JobJournal
from app.jobs import MAX_ENDED, Jobs
from app.schema.admin import PullRequest
from app.transfer_rate import RateMeter
from app.translate.jobs import job_entry
from store.errors import Cancelled, ModelNotFound
from store.models import InstalledModel
from store.progress import PullProgress

INSTALLED = cast(InstalledModel, None)


class Pulls:
    """Stands in for the store: every pull waits for its model to be let go, then ends as `outcomes` says."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.outcomes: dict[str, Exception] = {}
        self._gates: dict[str, threading.Event] = {}

    def __call__(
        self, request: PullRequest, on_progress: Callable[[PullProgress], None], is_cancelled: Callable[[], bool]
    ) -> InstalledModel:
        self.begun.append(request.model)
        on_progress(PullProgress("downloading", "a", 100, 40, 100, 40))
        while not self.gate(request.model).wait(0.005):
            if is_cancelled():
                raise Cancelled("stopped")
        if error := self.outcomes.get(request.model):
            raise error
        on_progress(PullProgress("downloading", "a", 100, 100, 100, 100))
        return INSTALLED

    def gate(self, model: str) -> threading.Event:
        return self._gates.setdefault(model, threading.Event())


@pytest.fixture
def pulls() -> Pulls:
    return Pulls()


@pytest.fixture
def journal(tmp_path: Path) -> JobJournal:
    return JobJournal(tmp_path / "jobs.json")


@pytest.fixture
def jobs(pulls: Pulls, journal: JobJournal) -> Jobs:
    return Jobs(pulls, journal, max_running=2)


async def follow(jobs: Jobs, job: Job, *, holds: bool = False) -> list[PullProgress]:
    return [progress async for progress in jobs.watch(job, holds=holds)]


def start(jobs: Jobs, model: str, **options: Any) -> Job:
    return jobs.start(PullRequest(model, **options), is_detached=True)


async def test_jobs_wait_in_order(jobs: Jobs, pulls: Pulls) -> None:
    first, second, third, fourth = (start(jobs, f"o/{number}") for number in range(4))
    assert [job.state for job in (first, second, third, fourth)] == ["running", "running", "queued", "queued"]
    assert third.status == "waiting until one of 2 other downloads has ended"
    jobs.pause(first)
    jobs.resume(first)
    assert [job.state for job in (first, third, fourth)] == ["queued", "running", "queued"]
    for number in range(4):
        pulls.gate(f"o/{number}").set()
    for job in (first, second, third, fourth):
        await follow(jobs, job)
    assert pulls.begun.index("o/2") < pulls.begun.index("o/3")
    assert {job.state for job in jobs.list()} == {"done"}


async def test_what_is_here_waits_for_nobody(jobs: Jobs, pulls: Pulls) -> None:
    for number in range(3):
        start(jobs, f"o/{number}")
    job = jobs.start(PullRequest("o/here"), is_here=True)
    assert (job.state, await follow(jobs, job)) == ("done", [])
    assert "o/here" not in pulls.begun


async def test_one_model_has_one_job(jobs: Jobs, pulls: Pulls) -> None:
    job = start(jobs, "Org/Repo", limit_bytes_per_s=5)
    assert start(jobs, "org/repo") is job
    assert job.request.limit_bytes_per_s == 5
    jobs.pause(job)
    assert start(jobs, "org/repo", force=True) is job
    assert (job.request.force, job.request.limit_bytes_per_s) == (True, None)
    pulls.gate("org/repo").set()
    await follow(jobs, job)
    assert start(jobs, "org/repo") is not job
    assert len(jobs.list()) == 1


async def test_the_last_who_holds_a_job_pauses_it(jobs: Jobs) -> None:
    job = jobs.start(PullRequest("o/m"))
    holders = [asyncio.create_task(follow(jobs, job, holds=True)) for _ in range(2)]
    onlooker = asyncio.create_task(follow(jobs, job))
    await asyncio.sleep(0.05)
    for holder in holders:
        assert job.state == "running"
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
    assert job.state == "paused"
    with pytest.raises(JobStopped, match=r"The download of o/m was paused; .* `quire pull o/m` goes on"):
        await onlooker


async def test_a_stopped_run_has_no_say_in_the_next_one(jobs: Jobs, pulls: Pulls) -> None:
    job = start(jobs, "o/m")
    before = job.run
    jobs.pause(job)
    jobs.resume(job)
    assert before is not None and job.run is not before
    await asyncio.wait_for(before.ended.wait(), 5)
    assert job.state == "running"
    pulls.gate("o/m").set()
    assert (await follow(jobs, job))[-1].done_bytes == 100


async def test_failures_are_told_to_followers_and_kept(
    jobs: Jobs, pulls: Pulls, caplog: pytest.LogCaptureFixture
) -> None:
    pulls.outcomes = {"o/gone": ModelNotFound("There is none; look again."), "o/bug": KeyError("secret")}
    for model, code, text in (
        ("o/gone", "model_not_found", "There is none; look again."),
        ("o/bug", "internal_error", "Something went wrong inside the daemon; its log has the details."),
    ):
        job = start(jobs, model)
        pulls.gate(model).set()
        with pytest.raises((ModelNotFound, AppError), match=text):
            await follow(jobs, job)
        error = job_entry(job).error
        assert error is not None
        assert (job.state, error.code, error.message) == ("failed", code, text)
        with pytest.raises((ModelNotFound, AppError)):
            await follow(jobs, job)
    assert "KeyError" in caplog.text


async def test_draining_ends_streams_and_the_next_daemon_knows_the_job(
    jobs: Jobs, pulls: Pulls, journal: JobJournal
) -> None:
    job = start(jobs, "o/m", limit_bytes_per_s=7)
    done = start(jobs, "o/done")
    pulls.gate("o/done").set()
    await follow(jobs, done)
    following = asyncio.create_task(follow(jobs, job))
    await asyncio.sleep(0.05)
    await jobs.drain()
    with pytest.raises(ShuttingDown, match="stopped with the daemon"):
        await following
    with pytest.raises(ShuttingDown):
        start(jobs, "o/more")
    (restored,) = Jobs(pulls, journal).list()
    assert (restored.id, restored.state, restored.request) == (job.id, "paused", job.request)
    assert (restored.done_bytes, restored.total_bytes) == (40, 100)


async def test_ended_jobs_are_forgotten_in_time(jobs: Jobs, pulls: Pulls) -> None:
    for number in range(MAX_ENDED + 3):
        pulls.gate(f"o/{number}").set()
        await follow(jobs, start(jobs, f"o/{number}"))
    assert len(jobs.list()) == MAX_ENDED
    last = jobs.list()[-1]
    await jobs.cancel(last)
    with pytest.raises(JobNotFound):
        jobs.find(last.id)


def test_a_journal_that_cannot_be_read_is_an_empty_one(journal: JobJournal, tmp_path: Path) -> None:
    assert journal.read() == ()
    for content in (b"", b"{}", b'[{"id": 1}]', b"\xff" * 100):
        (tmp_path / "jobs.json").write_bytes(content)
        assert journal.read() == ()
    JobJournal(tmp_path / "missing" / "jobs.json").write([])


async def test_a_watcher_keeps_the_newest_count_of_each_file_in_order() -> None:
    watcher = Watcher(holds=False)
    for done in range(1, 1000):
        watcher.tell(PullProgress("downloading", f"f{done % 3}", 1000, done, 3000, done))
    watcher.tell(PullProgress("almost there"))
    watcher.end(None)
    read = [progress async for progress in watcher.reports()]
    assert [progress.all_done_bytes for progress in read] == [997, 998, 999, 0]


def test_the_rate_is_that_of_the_last_seconds() -> None:
    now_s = 0.0
    meter = RateMeter(window_s=10.0, clock=lambda: now_s)
    meter.add(1_000_000)
    assert (meter.bytes_per_s, meter.seconds_left(100)) == (0, None)
    for second in range(1, 31):
        now_s = float(second)
        meter.add(1_000_000 + second * (100 if second <= 15 else 200))
    assert 195 <= meter.bytes_per_s <= 205
    assert meter.seconds_left(0) == 0
    now_s = 1000.0
    assert meter.bytes_per_s < 10


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_is_asked_no_place_stays_empty_and_every_stream_ends(
    jobs: Jobs, pulls: Pulls, seed: int
) -> None:
    choose = random.Random(seed)
    models = [f"o/{number}" for number in range(5)]
    streams: list[asyncio.Task[list[PullProgress]]] = []
    for _ in range(80):
        match choose.choice(("start", "start", "pull", "leave", "pause", "resume", "cancel", "finish", "wait")):
            case "start":
                start(jobs, choose.choice(models))
            case "pull":
                job = jobs.start(PullRequest(choose.choice(models)))
                streams.append(asyncio.create_task(follow(jobs, job, holds=True)))
                await asyncio.sleep(0)
            case "leave" if streams:
                choose.choice(streams).cancel()
            case "finish":
                pulls.gate(choose.choice(models)).set()
            case "wait":
                await asyncio.sleep(0.01)
            case ("pause" | "resume" | "cancel") as action if jobs.list():
                outcome = getattr(jobs, action)(choose.choice(jobs.list()))
                if outcome is not None:
                    await outcome
        running = [job for job in jobs.list() if job.state == "running"]
        queued = [job for job in jobs.list() if job.state == "queued"]
        assert len(running) <= 2
        assert len(running) == 2 or not queued
    for model in models:
        pulls.gate(model).set()
    await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 10)
    for job in jobs.list():
        if job.is_active:
            await asyncio.wait_for(follow(jobs, job), 10)
    assert {job.state for job in jobs.list()} <= {"done", "paused", "cancelled"}
