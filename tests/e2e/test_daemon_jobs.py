"""Downloads as jobs of the daemon: shared, detached, paused, cancelled, carried over a restart."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.daemon import FakeDaemon, eventually, running_daemon
from tests.fakes.hub import FakeHub
from tests.fakes.tiny_model import write_tiny_model

NAME = "org/tiny"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    model = write_tiny_model(tmp_path_factory.mktemp("source"))
    return {file.name: file.read_bytes() for file in model.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        for name in (NAME, "org/second", "org/third", "org/fourth"):
            hub.add(name, files)
        yield hub


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "daemon"


@pytest.fixture
def daemon(directory: Path, hub: FakeHub) -> Iterator[FakeDaemon]:
    with running_daemon(directory, HF_ENDPOINT=hub.endpoint) as daemon:
        yield daemon


@asynccontextmanager
async def client_of(daemon: FakeDaemon) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=30) as client:
        yield client


@pytest.fixture
async def http(daemon: FakeDaemon) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(daemon) as client:
        yield client


def stall(hub: FakeHub) -> None:
    """From now on the hub sends half of each file and no more."""
    hub.released.clear()
    hub.stalled.clear()
    hub.faults.stall_after_bytes = [1] * 100


def let_go(hub: FakeHub) -> None:
    hub.faults.stall_after_bytes = []
    hub.released.set()


async def until_stalled(hub: FakeHub) -> None:
    async def is_stalled() -> bool:
        return hub.stalled.is_set()

    await eventually(is_stalled)


async def start(http: httpx.AsyncClient, model: str = NAME, **options: Any) -> dict[str, Any]:
    answer = await http.post("/api/jobs", json={"model": model, **options})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def job_of(http: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    return dict((await http.get(f"/api/jobs/{job_id}")).json())


async def until(http: httpx.AsyncClient, job_id: str, state: str) -> dict[str, Any]:
    async def is_so() -> bool:
        return bool((await job_of(http, job_id))["state"] == state)

    await eventually(is_so)
    return await job_of(http, job_id)


async def follow(http: httpx.AsyncClient, job_id: str) -> list[dict[str, Any]]:
    return lines_of(await http.get(f"/api/jobs/{job_id}/events"))


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]


async def installed(http: httpx.AsyncClient) -> list[str]:
    return [entry["name"] for entry in (await http.get("/api/tags")).json()["models"]]


async def test_a_job_goes_on_without_its_client_and_can_be_followed(http: httpx.AsyncClient, hub: FakeHub) -> None:
    stall(hub)
    job = await start(http)
    assert (job["kind"], job["model"], job["state"], job["detached"]) == ("pull", NAME, "running", True)
    await until_stalled(hub)
    leaving = asyncio.create_task(follow(http, job["id"]))
    staying = asyncio.create_task(follow(http, job["id"]))
    await asyncio.sleep(0.2)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert (await job_of(http, job["id"]))["state"] == "running"
    let_go(hub)
    lines = await staying
    assert lines[-1] == {"status": "success"}
    counts = [(line.get("all_completed", 0), line["all_total"]) for line in lines if line.get("all_total")]
    assert counts == sorted(counts) and counts[-1][0] == counts[-1][1]
    done = await until(http, job["id"], "done")
    assert (done["completed"], done["total"]) == counts[-1]
    assert {file["completed"] == file["total"] for file in done["files"]} == {True}
    assert await installed(http) == [NAME]
    assert (await follow(http, job["id"]))[-1] == {"status": "success"}


async def test_two_pulls_of_one_model_are_one_job(http: httpx.AsyncClient, hub: FakeHub) -> None:
    stall(hub)
    first = asyncio.create_task(http.post("/api/pull", json={"model": NAME}))
    await until_stalled(hub)
    second = asyncio.create_task(http.post("/api/pull", json={"model": NAME.upper()}))
    await asyncio.sleep(0.2)
    (job,) = (await http.get("/api/jobs")).json()["jobs"]
    assert (job["state"], job["detached"]) == ("running", False)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.sleep(0.2)
    assert (await job_of(http, job["id"]))["state"] == "running"
    let_go(hub)
    assert lines_of(await second)[-1] == {"status": "success"}


async def test_the_last_client_of_a_pull_pauses_it_unless_it_was_detached(
    http: httpx.AsyncClient, hub: FakeHub
) -> None:
    stall(hub)
    pulling = asyncio.create_task(http.post("/api/pull", json={"model": NAME}))
    await until_stalled(hub)
    pulling.cancel()
    await asyncio.gather(pulling, return_exceptions=True)
    (job,) = (await http.get("/api/jobs")).json()["jobs"]
    await until(http, job["id"], "paused")

    let_go(hub)
    stall(hub)
    assert (await start(http))["id"] == job["id"]
    await until_stalled(hub)
    pulling = asyncio.create_task(http.post("/api/pull", json={"model": NAME}))
    await asyncio.sleep(0.2)
    pulling.cancel()
    await asyncio.gather(pulling, return_exceptions=True)
    await asyncio.sleep(0.2)
    assert (await job_of(http, job["id"]))["state"] == "running"
    let_go(hub)
    await until(http, job["id"], "done")


async def test_cancelling_keeps_what_arrived_or_discards_it(
    http: httpx.AsyncClient, hub: FakeHub, daemon: FakeDaemon
) -> None:
    stall(hub)
    job = await start(http)
    await until_stalled(hub)
    following = asyncio.create_task(follow(http, job["id"]))
    await asyncio.sleep(0.2)
    cancelled = (await http.delete(f"/api/jobs/{job['id']}")).json()
    assert (cancelled["job"]["state"], cancelled["freed_bytes"]) == ("cancelled", 0)
    error = (await following)[-1]["error"]
    assert (error["code"], error["message"]) == (
        "job_stopped",
        f"The download of {NAME} was cancelled; what has arrived is kept, and `quire pull {NAME}` goes on from there.",
    )
    partials = daemon.data_root / "downloads" / "models--org--tiny"
    assert list(partials.iterdir())

    let_go(hub)
    stall(hub)
    assert (await http.post(f"/api/jobs/{job['id']}/resume")).json()["state"] == "running"
    await until_stalled(hub)
    assert (await http.delete(f"/api/jobs/{job['id']}?discard=true")).json()["freed_bytes"] > 0
    assert not partials.exists()
    assert await installed(http) == []


async def test_deleting_what_arrived_takes_the_paused_job_along(http: httpx.AsyncClient, hub: FakeHub) -> None:
    stall(hub)
    job = await start(http)
    await until_stalled(hub)
    busy = await http.request("DELETE", "/api/delete", json={"model": NAME})
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "model_busy")
    await http.post(f"/api/jobs/{job['id']}/pause")

    async def is_deleted() -> bool:
        answer = await http.request("DELETE", "/api/delete", json={"model": NAME})
        return answer.status_code == 200

    await eventually(is_deleted)
    assert (await http.get("/api/jobs")).json() == {"jobs": []}


async def test_three_jobs_run_and_the_fourth_waits(http: httpx.AsyncClient, hub: FakeHub) -> None:
    stall(hub)
    jobs = [await start(http, name) for name in (NAME, "org/second", "org/third", "org/fourth")]
    assert [job["state"] for job in jobs] == ["running", "running", "running", "queued"]
    assert jobs[3]["status"] == "waiting until one of 3 other downloads has ended"
    await http.post(f"/api/jobs/{jobs[0]['id']}/pause")
    assert (await job_of(http, jobs[3]["id"]))["state"] == "running"
    assert (await http.post(f"/api/jobs/{jobs[0]['id']}/resume")).json()["state"] == "queued"
    let_go(hub)
    for job in jobs:
        await until(http, job["id"], "done")


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
async def test_unfinished_jobs_come_back_paused_after_a_restart(
    directory: Path, hub: FakeHub, ending: signal.Signals
) -> None:
    stall(hub)
    with running_daemon(directory, HF_ENDPOINT=hub.endpoint) as daemon:
        async with client_of(daemon) as http:
            job = await start(http, limit_bytes_per_s=10**9)
            await until_stalled(hub)
            following = asyncio.create_task(follow(http, job["id"]))
            await asyncio.sleep(0.2)
            os.kill(daemon.process.pid, ending)
            daemon.process.wait(15)
            (answer,) = await asyncio.gather(following, return_exceptions=True)
            if ending == signal.SIGTERM:
                assert isinstance(answer, list)
                assert answer[-1]["error"]["code"] == "shutting_down"
                assert "what has arrived is kept" in answer[-1]["error"]["message"]
    let_go(hub)
    with running_daemon(directory, HF_ENDPOINT=hub.endpoint) as daemon:
        async with client_of(daemon) as http:
            (again,) = (await http.get("/api/jobs")).json()["jobs"]
            assert (again["id"], again["model"], again["state"]) == (job["id"], NAME, "paused")
            await http.post(f"/api/jobs/{job['id']}/resume")
            await until(http, job["id"], "done")
    with running_daemon(directory, HF_ENDPOINT=hub.endpoint) as daemon:
        async with client_of(daemon) as http:
            assert (await http.get("/api/jobs")).json() == {"jobs": []}
            assert await installed(http) == [NAME]


async def test_a_job_that_fails_says_why_and_can_be_tried_again(
    http: httpx.AsyncClient, hub: FakeHub, files: dict[str, bytes]
) -> None:
    job = await start(http, "org/missing")
    failed = await until(http, job["id"], "failed")
    assert failed["error"]["code"] == "model_not_found"
    assert (await http.get(f"/api/jobs/{job['id']}/events")).status_code == 404
    hub.add("org/missing", files)
    assert (await start(http, "org/missing"))["id"] == job["id"]
    await until(http, job["id"], "done")


async def test_what_is_no_job(http: httpx.AsyncClient) -> None:
    for path in ("/api/jobs/nope", "/api/jobs/nope/events"):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
    refused = await http.post("/api/jobs", json={"model": "org/tiny@"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_model_name")
    assert (await http.post("/api/jobs", json={"model": NAME, "kind": "dance"})).status_code == 400
    assert (await http.get("/api/jobs")).json() == {"jobs": []}


async def test_the_routes_are_in_the_schema(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/schema/openapi.json")).json()["paths"]
    assert {"/api/jobs", "/api/jobs/{job_id}", "/api/jobs/{job_id}/events", "/api/pull"} <= set(paths)
