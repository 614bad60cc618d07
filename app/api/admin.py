"""Model management: /api/tags, show, delete, shutdown.

Pulls are in `app.api.jobs`, models in memory in `app.api.residency`.  Field names follow Ollama's API where it has
the same thing; the store is synchronous and runs in threads.  Translation is in `app.translate.admin`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from litestar import Router, delete, get, post
from litestar.openapi import ResponseSpec

from app.api.body import JsonBody
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
    ShutdownAnswer,
)
from app.translate.admin import installed_entry, model_card
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


@post("/show", dto=JsonBody, status_code=200)
async def show_model(data: ModelRequest, models: ModelStore, facts: KnownFacts) -> ModelCardDetails:
    def card() -> ModelCardDetails:
        installed = models.find(data.model)
        return model_card(installed, facts.read(installed.path), read_pooling(installed.path))

    return await asyncio.to_thread(card)


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


def _installed_entry(model: InstalledModel, facts: KnownFacts) -> InstalledModelEntry:
    try:
        return installed_entry(model, facts.read(model.path), listed_capability(model.path))
    except StoreError:
        return installed_entry(model, None, "completion")


admin_router = Router(
    "/api",
    route_handlers=[
        list_installed,
        show_model,
        delete_model,
        shut_down,
    ],
    tags=["Models"],
)
