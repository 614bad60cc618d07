"""Models in memory → bodies of the admin routes: pure functions.  Called by `app.api.admin`."""

from __future__ import annotations

import msgspec

from app.residency.model_state import ModelState
from app.schema.admin import RunningModelEntry
from app.translate.admin import rfc3339


def running_entries(state: ModelState) -> tuple[RunningModelEntry, ...]:
    """One for each name; the first has the memory, which the others share."""
    first = _entry(state)
    notes = (f"shares its worker with {first.name}", *first.notes)
    others = (
        msgspec.structs.replace(first, name=name, model=name, size=0, size_vram=0, notes=notes)
        for name in state.names[1:]
    )
    return (first, *others)


def _entry(state: ModelState) -> RunningModelEntry:
    return RunningModelEntry(
        name=state.name,
        model=state.name,
        size=state.size_bytes,
        size_vram=0 if state.device.startswith("cpu") else state.size_bytes,
        digest=state.digest,
        context_length=state.max_model_len,
        device=state.device,
        dtype=state.dtype,
        architecture=state.architecture,
        loaded_at=rfc3339(state.loaded_at),
        pid=state.pid,
        num_requests=state.num_requests,
        kv_cache_tokens=state.kv_tokens,
        kv_cache_usage=round(state.kv_usage, 4),
        notes=state.notes,
    )
