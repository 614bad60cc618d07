"""What is in memory, and what happened to it → bodies of the routes about it: pure functions.

Called by `app.api.residency`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from app.keep_alive import format_keep_alive
from app.residency.events import Event
from app.residency.model_state import ModelState
from app.schema.residency import DeviceSplit, ResidencyEvent, RunningModelEntry
from app.translate.admin import rfc3339


def running_entries(state: ModelState) -> tuple[RunningModelEntry, ...]:
    """One for each name; the first has the memory, which the others share."""
    first = _entry(state)
    notes = (f"shares its worker with {first.name}", *first.notes)
    others = (
        msgspec.structs.replace(first, name=name, model=name, size=0, size_vram=0, size_host=0, notes=notes)
        for name in state.names[1:]
    )
    return (first, *others)


def device_split(
    device: str, *, total_bytes: int, others_bytes: int, limit: float, states: Iterable[ModelState]
) -> DeviceSplit:
    """`states` are all models in memory, on whichever device."""
    models = sum(state.size_bytes for state in states if state.device == device)
    return DeviceSplit(
        device=device,
        total=total_bytes,
        limit=limit,
        models=models,
        others=others_bytes,
        free=max(0, int(total_bytes * limit) - others_bytes - models),
    )


def event_entry(event: Event) -> ResidencyEvent:
    return ResidencyEvent(
        number=event.number,
        at=rfc3339(event.at),
        kind=event.kind,
        model=event.model,
        why=event.why,
        device=event.device,
        size=event.size_bytes,
    )


def _entry(state: ModelState) -> RunningModelEntry:
    is_on_gpu = state.device.startswith("cuda")
    return RunningModelEntry(
        name=state.name,
        model=state.name,
        state=state.state,
        size=state.size_bytes,
        size_vram=state.size_bytes if is_on_gpu else 0,
        size_host=state.host_bytes,
        digest=state.digest,
        device=state.device,
        share=state.share,
        share_in_force=round(state.share_in_force, 4),
        pinned=state.is_pinned,
        keep_alive=None if state.keep_alive_s is None else format_keep_alive(state.keep_alive_s),
        expires_at=None if state.until is None else rfc3339(state.until),
        context_length=state.max_model_len,
        kv_cache_tokens=state.kv_tokens,
        kv_cache_usage=round(state.kv_usage, 4),
        max_concurrency=round(state.max_concurrency, 2),
        num_requests=state.num_requests,
        num_running=state.num_running,
        num_waiting=state.num_waiting,
        task=state.task,
        dtype=state.dtype,
        architecture=state.architecture,
        loaded_at=rfc3339(state.loaded_at) if state.loaded_at else None,
        pid=state.pid,
        note=state.note,
        notes=state.notes,
    )
