"""Model management: /api/tags, ps, show, delete, stop, load, shutdown.  Pulls are in `app.api.jobs`.

Field names follow Ollama's API where it has the same thing.  Loading answers with JSON lines;
the store is synchronous and runs in threads.  Translation is in
`app.translate.admin`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from litestar import Router, delete, get, post
from litestar.openapi import ResponseSpec

from app.api.body import JsonBody
from app.api.streaming import EventStream, json_line
from app.errors import ModelInUse
from app.jobs import Jobs
from app.model_task import listed_capability
from app.residency.supervisor import Supervisor
from app.schema.admin import (
    DeletedModel,
    InstalledModelEntry,
    InstalledModels,
    ModelCardDetails,
    ModelRequest,
    ProgressLine,
    RunningModels,
    ShutdownAnswer,
    StoppedModel,
)
from app.translate.admin import installed_entry, load_line, model_card
from app.translate.running import running_entries
from engine.pooling.config import read_pooling
from store.errors import StoreError
from store.known_facts import KnownFacts
from store.models import InstalledModel, ModelStore
from store.upkeep.removal import plan_removal, remove

PROGRESS = {200: ResponseSpec(ProgressLine, description="JSON lines; the last one has the status success.")}


@get("/tags")
async def list_installed(models: ModelStore, facts: KnownFacts) -> InstalledModels:
    """The installed models."""

    def entries() -> tuple[InstalledModelEntry, ...]:
        return tuple(_installed_entry(model, facts) for model in models.list())

    return InstalledModels(await asyncio.to_thread(entries))


@get("/ps")
async def list_running(supervisor: Supervisor) -> RunningModels:
    """The models in memory."""
    return RunningModels(tuple(entry for state in supervisor.states() for entry in running_entries(state)))


@post("/show", dto=JsonBody, status_code=200)
async def show_model(data: ModelRequest, models: ModelStore, facts: KnownFacts) -> ModelCardDetails:
    def card() -> ModelCardDetails:
        installed = models.find(data.model)
        return model_card(installed, facts.read(installed.path), read_pooling(installed.path))

    return await asyncio.to_thread(card)


@post("/load", dto=JsonBody, status_code=200, responses=PROGRESS)
async def load_model(data: ModelRequest, supervisor: Supervisor) -> EventStream:
    """Bring a model into memory; ends when it is ready for requests."""
    return _json_lines(_load_lines(data.model, supervisor))


@post("/stop", dto=JsonBody, status_code=200)
async def stop_model(data: ModelRequest, supervisor: Supervisor) -> StoppedModel:
    """Take a model out of memory; its open requests end with an error."""
    return StoppedModel(stopped=await supervisor.stop(data.model))


@delete("/delete", dto=JsonBody, status_code=200)
async def delete_model(data: ModelRequest, models: ModelStore, supervisor: Supervisor, jobs: Jobs) -> DeletedModel:
    """Delete a model's files, or those of an unfinished download; refused while it is in memory."""
    name = (await asyncio.to_thread(plan_removal, models, data.model)).name
    if supervisor.is_resident(name):
        raise ModelInUse(f"{name} is in memory; stop it first with `quire stop {name}`, or give `quire rm --force`.")
    removal = await asyncio.to_thread(remove, models, data.model)
    jobs.forget(removal.name)
    return DeletedModel(removal.freed_bytes)


@post("/shutdown", status_code=202)
async def shut_down(request_shutdown: Callable[[], None]) -> ShutdownAnswer:
    """End the daemon after this answer; its workers end with it."""
    asyncio.get_running_loop().call_soon(request_shutdown)
    return ShutdownAnswer()


def _json_lines(lines: AsyncGenerator[bytes, None]) -> EventStream:
    return EventStream(lines, media_type="application/x-ndjson", encode_error=json_line)


def _installed_entry(model: InstalledModel, facts: KnownFacts) -> InstalledModelEntry:
    try:
        return installed_entry(model, facts.read(model.path), listed_capability(model.path))
    except StoreError:
        return installed_entry(model, None, "completion")


async def _load_lines(name: str, supervisor: Supervisor) -> AsyncGenerator[bytes, None]:
    async with aclosing(supervisor.load(name)) as reports:
        async for progress in reports:
            yield json_line(load_line(progress))
    yield json_line(ProgressLine("success"))


admin_router = Router(
    "/api",
    route_handlers=[
        list_installed,
        list_running,
        show_model,
        load_model,
        stop_model,
        delete_model,
        shut_down,
    ],
    tags=["Models"],
)
