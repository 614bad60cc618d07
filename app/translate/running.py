"""Models in memory → bodies of the admin routes: pure functions.  Called by `app.api.admin`."""

from __future__ import annotations

from app.metrics import kv_usage
from app.residency.memory import declared_bytes
from app.residency.model_loader import ResidentModel
from app.schema.admin import RunningModelEntry
from app.translate.admin import rfc3339


def running_entry(resident: ResidentModel) -> RunningModelEntry:
    facts = resident.facts
    size_bytes = declared_bytes(facts)
    return RunningModelEntry(
        name=resident.name,
        model=resident.name,
        size=size_bytes,
        size_vram=0 if facts.device.startswith("cpu") else size_bytes,
        digest=resident.installed.digest,
        context_length=facts.max_model_len,
        device=facts.device,
        dtype=facts.dtype,
        architecture=facts.architecture,
        loaded_at=rfc3339(resident.loaded_at),
        pid=resident.worker.pid,
        num_requests=resident.generator.num_open,
        kv_cache_tokens=facts.num_kv_tokens,
        kv_cache_usage=round(kv_usage(resident.worker.stats), 4),
        notes=facts.notes,
    )
