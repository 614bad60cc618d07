"""A memory plan as a person sees it, and as JSON.

Called by `quire plan`; the figures are `app.residency.advice.plan`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.cli.fitted_table import fitted_lines, picture_columns, table_columns
from app.cli.memory_bar import staircase
from app.cli.output import write_text
from store.space import format_bytes

if TYPE_CHECKING:
    from app.residency.advice.plan import DevicePlan, ModelPlan
    from app.residency.arithmetic.tenants import DeviceShare

_MOST_COLUMNS = 100
_HEADER = ("MODEL", "SHARE", "WEIGHTS", "WORKSPACE", "KV CACHE", "TOKENS", "CONTEXT", "CONCURRENCY")
_SHORT = {"CONCURRENCY": "CONC"}
_SPARE = ("SHARE", "CONTEXT", "WORKSPACE", "TOKENS")
"""What a narrow terminal does without, in this order."""


def show_plan(plan: DevicePlan, memory_limit: float, *, is_estimate: bool) -> None:
    """A table, a picture, the figures of the first model, and sentences; `memory_limit` is the setting."""
    from app.residency.advice.plan_advice import changes, notes

    write_text(f"{_device_sentence(plan.device, memory_limit)}\n\n")
    rows = [_row(model) for model in plan.models]
    held, free = plan.held_bytes, plan.device.total_bytes - plan.held_bytes
    if held:
        rows.append(("free", _share(free, plan.device), "", "", format_bytes(max(0, free)), "", "", ""))
    table = fitted_lines(_HEADER, rows, table_columns(), short_titles=_SHORT, spare_titles=_SPARE)
    write_text("".join(f"{line}\n" for line in (*table, "", *_picture(plan), "")))
    for label, value in _details(plan):
        write_text(f"{label:<12}{value}\n")
    sentences = (*changes(plan), *notes(plan, is_estimate=is_estimate))
    write_text("".join(f"\n{sentence}" for sentence in sentences) + "\n" if sentences else "")


def _device_sentence(device: DeviceShare, memory_limit: float) -> str:
    what = f"The GPU {device.name}" if device.name != "cpu" else "RAM"
    sentence = (
        f"{what} of {format_bytes(device.total_bytes)}; models may have {format_bytes(device.limit_bytes)} of it "
        f"(memory_limit {device.limit:g})."
    )
    if device.limit > memory_limit:
        sentence += f"  The setting is {memory_limit:g}: raise memory_limit, or the daemon refuses the share."
    return sentence


def _row(model: ModelPlan) -> tuple[str, ...]:
    share = f"{model.share:g}" if model.share is not None else "-"
    fixed = (format_bytes(model.footprint.weight_bytes), format_bytes(model.footprint.workspace.total_bytes))
    if model.refusal:
        return (model.name, share, *fixed, "no room", "", "", "")
    if not model.num_blocks:
        return (model.name, share, *fixed, "none", "", _tokens(model.max_model_len), "")
    concurrency = f"{model.max_concurrency:,.2f}x"
    return (
        model.name,
        share,
        *fixed,
        format_bytes(model.kv_bytes),
        f"{model.num_tokens:,}",
        _tokens(model.served_len),
        concurrency,
    )


def _picture(plan: DevicePlan) -> list[str]:
    bars = [
        (model.name, (model.footprint.weight_bytes, model.footprint.workspace.total_bytes, model.kv_bytes))
        for model in plan.models
    ]
    held, device = sum(sum(parts) for _, parts in bars), plan.device
    return staircase(
        bars,
        ("weights", "workspace", "KV cache"),
        free_bytes=max(0, device.limit_bytes - held),
        kept_bytes=max(0, device.total_bytes - max(held, device.limit_bytes)),
        num_columns=min(picture_columns(), _MOST_COLUMNS),
    )


def _details(plan: DevicePlan) -> list[tuple[str, str]]:
    """The figures of the first model, with how they come about."""
    from app.residency.advice.plan_advice import per_token_text

    first, facts = plan.models[0], plan.wishes[0].facts
    workspace = first.footprint.workspace
    parts = [
        ("driver and libraries" if plan.device.name != "cpu" else "process", workspace.process),
        ("steps", workspace.step),
        ("graphs", workspace.graphs),
        ("rounding of the cache", workspace.rounding),
    ]
    details = [
        ("weights", f"{facts.num_parameters:,} parameters, {first.footprint.weight_bytes:,} bytes"),
        (
            "workspace",
            ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
            + "; an estimate, measured when loaded",
        ),
    ]
    if not first.footprint.kv_bytes_per_token:
        return [*details, ("KV cache", "none: it reads a whole text at once")]
    details += [
        ("per token", per_token_text(facts, first.footprint.kv_bytes_per_token)),
        ("per block", f"{first.block_bytes:,} bytes for {first.block_size} tokens"),
    ]
    if first.refusal is None:
        details += [
            ("KV cache", f"{first.num_blocks:,} blocks = {first.num_tokens:,} tokens"),
            ("concurrency", f"{first.max_concurrency:,.2f}x for {_tokens(first.served_len)} tokens per request"),
        ]
    return details


def _tokens(length: int) -> str:
    return f"{length:,}" if length else "unknown"


def _share(size_bytes: int, device: DeviceShare) -> str:
    return f"{max(0, size_bytes) / device.total_bytes:.2f}"


def plan_as_json(plan: DevicePlan, *, is_estimate: bool) -> dict[str, Any]:
    """The same for programs: sizes in bytes, lengths in tokens."""
    from app.residency.advice.plan_advice import changes, notes

    return {
        "device": {
            "name": plan.device.name,
            "total": plan.device.total_bytes,
            "limit": plan.device.limit,
            "usable": plan.device.usable_bytes,
        },
        "models": [_model_as_json(model) for model in plan.models],
        "free": plan.device.total_bytes - plan.held_bytes,
        "fits": plan.fits,
        "changes": changes(plan),
        "notes": notes(plan, is_estimate=is_estimate),
    }


def _model_as_json(model: ModelPlan) -> dict[str, Any]:
    workspace = model.footprint.workspace
    return {
        "name": model.name,
        "share": model.share,
        "budget": model.budget_bytes,
        "weights": model.footprint.weight_bytes,
        "workspace": {
            "process": workspace.process,
            "step": workspace.step,
            "graphs": workspace.graphs,
            "rounding": workspace.rounding,
            "total": workspace.total_bytes,
        },
        "kv_cache": {
            "bytes": model.kv_bytes,
            "bytes_per_token": model.footprint.kv_bytes_per_token,
            "bytes_per_block": model.block_bytes,
            "block_size": model.block_size,
            "blocks": model.num_blocks,
            "tokens": model.num_tokens,
        },
        "max_model_len": model.max_model_len,
        "context": model.served_len,
        "max_concurrency": round(model.max_concurrency, 2),
        "least_share": model.refusal.least_share if model.refusal else None,
        "fits": model.refusal is None,
    }
