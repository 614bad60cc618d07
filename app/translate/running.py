"""Models in memory → bodies of the admin routes: pure functions.  Called by `app.api.admin`."""

from __future__ import annotations

import msgspec

from app.metrics import kv_usage
from app.residency.memory import declared_bytes
from app.residency.model_loader import ResidentModel
from app.schema.admin import RunningModelEntry
from app.translate.admin import rfc3339


def running_entries(resident: ResidentModel) -> tuple[RunningModelEntry, ...]:
    """One for each name; the first has the memory, which the others share."""
    first = _entry(resident, resident.names[0], declared_bytes(resident.facts))
    notes = (f"shares its worker with {first.name}", *first.notes)
    others = (msgspec.structs.replace(_entry(resident, name, 0), notes=notes) for name in resident.names[1:])
    return (first, *others)


def _entry(resident: ResidentModel, name: str, size_bytes: int) -> RunningModelEntry:
    facts = resident.facts
    return RunningModelEntry(
        name=name,
        model=name,
        size=size_bytes,
        size_vram=0 if facts.device.startswith("cpu") else size_bytes,
        digest=resident.installed.digest,
        context_length=facts.max_model_len,
        device=facts.device,
        dtype=facts.dtype,
        architecture=facts.architecture,
        loaded_at=rfc3339(resident.loaded_at),
        pid=resident.worker.pid,
        num_requests=resident.open_requests.num,
        kv_cache_tokens=facts.num_kv_tokens,
        kv_cache_usage=round(kv_usage(resident.worker.stats), 4),
        notes=facts.notes,
    )
