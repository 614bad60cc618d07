"""Models in memory: /api/ps, load, share, pin, sleep, wake, stop, events.

Field names follow Ollama's API where it has the same thing.  Loading and followed events answer with JSON lines;
whatever changes a model answers with what it is afterwards.  Translation is in `app.translate.running`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from litestar import Response, Router, get, post
from litestar.openapi import ResponseSpec

from app.api.body import JsonBody
from app.api.streaming import EventStream, json_line
from app.keep_alive import granted_keep_alive
from app.residency.supervisor import Supervisor
from app.schema.admin import ModelRequest, ProgressLine
from app.schema.error import ErrorBody
from app.schema.residency import (
    LoadRequest,
    PinRequest,
    ResidencyEvents,
    RunningModelEntry,
    RunningModels,
    ShareRequest,
    StoppedModel,
)
from app.settings import Settings
from app.translate.admin import load_line
from app.translate.running import device_split, event_entry, running_entries

PROGRESS = {200: ResponseSpec(ProgressLine, description="JSON lines; the last one has the status success.")}
EVENTS = {200: ResponseSpec(ResidencyEvents, description="With follow=true, each event as a JSON line.")}
CHANGES = {
    409: ResponseSpec(ErrorBody, description="The model is not in memory, or not in a state that allows it."),
    503: ResponseSpec(ErrorBody, description="There is no room; the message says which share would be enough."),
}


@get("/ps")
async def list_running(supervisor: Supervisor) -> RunningModels:
    """The models in memory, on their way there or out of it, and how each device's memory is split."""
    devices = await supervisor.devices()
    states = supervisor.states()
    return RunningModels(
        models=tuple(entry for state in states for entry in running_entries(state)),
        devices=tuple(
            device_split(
                device.name,
                total_bytes=device.total_bytes,
                others_bytes=device.others_bytes,
                limit=device.limit,
                states=states,
            )
            for device in devices
        ),
    )


@post("/load", dto=JsonBody, status_code=200, responses=PROGRESS)
async def load_model(data: LoadRequest, supervisor: Supervisor, settings: Settings) -> EventStream:
    """Bring a model into memory, or change how it is kept there; ends when it is ready for requests."""
    keep_alive = granted_keep_alive(data.keep_alive, settings.max_keep_alive)

    async def lines() -> AsyncGenerator[bytes, None]:
        loading = supervisor.load(data.model, share=data.share, pin=data.pin, keep_alive=keep_alive)
        async with aclosing(loading) as reports:
            async for progress in reports:
                yield json_line(load_line(progress))
        yield json_line(ProgressLine("success"))

    return EventStream(lines(), media_type="application/x-ndjson", encode_error=json_line)


@post("/share", dto=JsonBody, status_code=200, responses=CHANGES)
async def share_model(data: ShareRequest, supervisor: Supervisor) -> RunningModelEntry:
    """Give a model in memory another share of its device; its requests go on."""
    await supervisor.set_share(data.model, data.share)
    return await _entry(data.model, supervisor)


@post("/pin", dto=JsonBody, status_code=200, responses=CHANGES)
async def pin_model(data: PinRequest, supervisor: Supervisor) -> RunningModelEntry:
    """Keep a model in memory whatever else is asked for, or no longer."""
    await supervisor.pin(data.model, data.pin)
    return await _entry(data.model, supervisor)


@post("/sleep", dto=JsonBody, status_code=200, responses=CHANGES)
async def put_model_to_sleep(data: ModelRequest, supervisor: Supervisor) -> RunningModelEntry:
    """Give a model's device memory back and keep its weights in RAM; its open requests finish first."""
    await supervisor.sleep(data.model)
    return await _entry(data.model, supervisor)


@post("/wake", dto=JsonBody, status_code=200, responses=CHANGES)
async def wake_model(data: ModelRequest, supervisor: Supervisor) -> RunningModelEntry:
    """Bring a sleeping model back."""
    await supervisor.wake(data.model)
    return await _entry(data.model, supervisor)


@post("/stop", dto=JsonBody, status_code=200)
async def stop_model(data: ModelRequest, supervisor: Supervisor) -> StoppedModel:
    """Take a model out of memory; its open requests end with an error."""
    return StoppedModel(stopped=await supervisor.stop(data.model))


@get("/events", responses=EVENTS)
async def list_events(
    supervisor: Supervisor, settings: Settings, after: int = 0, follow: bool = False
) -> Response[ResidencyEvents] | EventStream:
    """Why models came, slept, left or failed, oldest first; `after` leaves out those up to this number.

    The daemon keeps the latest of its life.  With `follow` the answer goes on until the client leaves.
    """
    if not follow:
        return Response(ResidencyEvents(tuple(map(event_entry, supervisor.events.after(after)))))

    async def lines() -> AsyncGenerator[bytes, None]:
        # Blank, so that the client sees at once that it is heard, whenever the first event comes.
        yield b"\n"
        async with aclosing(supervisor.events.follow(after)) as following:
            async for event in following:
                yield json_line(event_entry(event))

    return EventStream(
        lines(),
        media_type="application/x-ndjson",
        encode_error=json_line,
        keep_alive=b"\n",
        keep_alive_interval_s=settings.keep_alive_interval_s,
    )


async def _entry(name: str, supervisor: Supervisor) -> RunningModelEntry:
    """What the model of this name or alias is now.  Raises `ModelNotLoaded` if it has left in the same moment."""
    name, state = await supervisor.state(name)
    return next(entry for entry in running_entries(state) if entry.name == name)


residency_router = Router(
    "/api",
    route_handlers=[
        list_running,
        load_model,
        share_model,
        pin_model,
        put_model_to_sleep,
        wake_model,
        stop_model,
        list_events,
    ],
    tags=["Memory"],
)
