"""What a slot is like at this moment: as a `Tenant` for the arithmetic, as a `ModelState` for people.

Pure functions of a slot and a clock; called by `app.residency.room` and the supervisor.
"""

from __future__ import annotations

from msgspec.structs import replace

from app.metrics import kv_usage
from app.residency.arithmetic.memory import is_gpu
from app.residency.arithmetic.tenants import Tenant, TenantState
from app.residency.model_state import ModelState, State
from app.residency.slot import Phase, Slot

_SHOWN: dict[Phase, State] = {
    Phase.LOADING: "loading",
    Phase.WAKING: "loading",
    Phase.READY: "ready",
    Phase.DRAINING: "draining",
    Phase.LEAVING: "draining",
    Phase.FALLING_ASLEEP: "draining",
    Phase.ASLEEP: "asleep",
}
_TENANT_STATES: dict[Phase, TenantState] = {Phase.LOADING: "loading", Phase.ASLEEP: "asleep"}


def tenant_of(slot: Slot, held_bytes: int) -> Tenant:
    """The model as the arithmetic sees it; `held_bytes` is its entry in the ledger.

    Of a model that is being loaded or woken all that was promised counts, and of one that is leaving all that it
    has not given back yet; neither can give anything.
    """
    need, model = slot.need, slot.model
    state = _TENANT_STATES.get(slot.phase, "awake")
    if model is None or slot.phase not in (Phase.READY, Phase.DRAINING, Phase.ASLEEP):
        return Tenant(
            name=slot.name,
            device=slot.device,
            state="loading",
            fixed_bytes=held_bytes,
            kv_bytes=0,
            last_used_at=slot.last_used_at,
            is_busy=True,
        )
    stats = model.worker.stats
    is_asleep = state == "asleep"
    return Tenant(
        name=slot.name,
        device=slot.device,
        state=state,
        fixed_bytes=model.fixed_bytes if is_asleep else held_bytes - model.kv_bytes,
        kv_bytes=0 if is_asleep else model.kv_bytes,
        last_used_at=slot.last_used_at,
        kv_used_bytes=0 if is_asleep else (stats.num_blocks - stats.num_free_blocks) * model.block_bytes,
        least_kv_bytes=min(need.least_kv_bytes, model.most_kv_bytes) if need else 0,
        wanted_kv_bytes=min(need.wanted_kv_bytes, model.most_kv_bytes) if need else 0,
        most_kv_bytes=model.most_kv_bytes,
        asleep_bytes=slot.asleep_bytes,
        weight_bytes=model.facts.weight_bytes,
        share=slot.wishes.share,
        is_pinned=slot.wishes.is_pinned,
        # Whoever waits for a drained model waits until its next turn.
        is_busy=slot.num_leases > 0,
        num_waiting=stats.num_waiting,
        num_uses=slot.num_uses,
        load_seconds=slot.load_seconds,
        # In RAM there is nothing to be won: what sleeps lies there as well.
        can_sleep=is_gpu(slot.device),
    )


def state_of(slot: Slot, *, held_bytes: int, device_bytes: int, now: float, epoch_now: float) -> ModelState:
    """The model as people see it; `now` is the event loop's time, `device_bytes` the total of its device."""
    common = ModelState(
        names=tuple(slot.names),
        state=_shown(slot),
        digest=slot.installed.digest,
        device=slot.device,
        size_bytes=held_bytes,
        host_bytes=slot.host_bytes,
        share=slot.wishes.share,
        share_in_force=held_bytes / device_bytes if device_bytes else 0.0,
        is_pinned=slot.wishes.is_pinned,
        num_requests=slot.num_leases + len(slot.line),
        num_waiting=len(slot.line),
        until=None if slot.expires_at is None else epoch_now + slot.expires_at - now,
        keep_alive_s=slot.keep_alive_s,
        note=slot.note or slot.failure,
    )
    model = slot.model
    if model is None:
        return common
    facts, stats, is_asleep = model.facts, model.worker.stats, slot.phase is Phase.ASLEEP
    kv_bytes = 0 if is_asleep else min(model.kv_bytes, held_bytes)
    return replace(
        common,
        fixed_bytes=held_bytes - kv_bytes,
        kv_bytes=kv_bytes,
        kv_tokens=0 if is_asleep else facts.num_kv_tokens,
        kv_usage=0.0 if is_asleep else kv_usage(stats),
        max_concurrency=0.0 if is_asleep or not facts.max_model_len else facts.max_concurrency,
        max_model_len=facts.max_model_len,
        num_running=stats.num_running,
        num_waiting=len(slot.line) + stats.num_waiting,
        task=facts.task,
        architecture=facts.architecture,
        dtype=facts.dtype,
        pid=model.worker.pid,
        loaded_at=model.loaded_at,
        notes=facts.notes,
    )


def _shown(slot: Slot) -> State:
    if slot.phase is Phase.COLD:
        return "waiting" if slot.line else "failed"
    return _SHOWN[slot.phase]
