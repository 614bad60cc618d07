"""The table of `quire ps`, and the picture below it of how each device's memory is split.  Pure text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from app.cli.fitted_table import fitted_lines
from app.cli.memory_bar import FREE_FILL, KEPT_FILL, KEPT_LABEL, MODEL_FILLS, OTHERS_FILL, Part, picture
from app.residency.words import memory_name
from store.space import format_bytes

if TYPE_CHECKING:
    from app.schema.residency import DeviceSplit, RunningModelEntry

WIDEST_PICTURE = 100
_HEADER = (
    "NAME",
    "SIZE",
    "DEVICE",
    "SHARE",
    "KV TOKENS",
    "MAX CONCURRENCY",
    "CONTEXT",
    "RUNNING/WAITING",
    "STATE",
    "UNTIL",
)
_SHORT = {"MAX CONCURRENCY": "MAX CONC", "RUNNING/WAITING": "RUN/WAIT"}
_SPARE = ("CONTEXT", "DEVICE", "MAX CONCURRENCY", "SHARE", "KV TOKENS")
"""What a narrow terminal does without, in this order; the picture below names devices, too."""


def running_lines(
    models: Sequence[RunningModelEntry], num_columns: int | None, *, now: datetime | None = None
) -> list[str]:
    """The table, at most `num_columns` wide where that is possible; None for as wide as it is."""
    rows = [_row(model, now or datetime.now(UTC)) for model in models]
    return fitted_lines(_HEADER, rows, num_columns, short_titles=_SHORT, spare_titles=_SPARE)


def split_lines(device: DeviceSplit, models: Sequence[RunningModelEntry], num_columns: int) -> list[str]:
    """The bar of one device and its legend: what each model holds, what other programs hold, and what is free."""
    held = [model for model in models if model.device == device.device and model.size]
    parts = [Part(MODEL_FILLS[index % len(MODEL_FILLS)], model.name, model.size) for index, model in enumerate(held)]
    kept = max(0, device.total - device.models - device.others - device.free)
    parts += [
        Part(OTHERS_FILL, "other programs", device.others),
        Part(FREE_FILL, "free", device.free),
        Part(KEPT_FILL, KEPT_LABEL, kept),
    ]
    return picture(
        memory_name(device.device), [part for part in parts if part.size_bytes], min(num_columns, WIDEST_PICTURE)
    )


def until_text(model: RunningModelEntry, now: datetime) -> str:
    """`in 29 min`, or why it has no end; empty for a model that is not there yet."""
    if model.state in ("waiting", "loading", "failed"):
        return ""
    if model.expires_at is not None:
        return _in_text((datetime.fromisoformat(model.expires_at) - now).total_seconds())
    if model.pinned:
        return "pinned"
    if model.num_requests or model.num_running or model.num_waiting:
        return "in use"
    return "for ever" if model.keep_alive == "-1" else ""


def notes_of(models: Sequence[RunningModelEntry]) -> list[str]:
    """What the table has no column for: why a model failed or what it waits for, what sleeps where."""
    notes = [
        model.note if model.note.startswith(f"{model.name} ") else f"{model.name}: {model.note}"
        for model in models
        if model.note
    ]
    notes += [
        f"{model.name} sleeps, its weights in {format_bytes(model.size_host)} of RAM."
        for model in models
        if model.size_host
    ]
    return notes


def description(model: RunningModelEntry) -> str:
    """`5.1 GB of cuda:0 (share 0.65, pinned), 426,448 tokens of KV cache`."""
    details = [f"share {_share_text(model)}"] if _share_text(model) else []
    details += ["pinned"] if model.pinned else []
    held = f"{format_bytes(model.size)} of {memory_name(model.device)}"
    text = f"{held} ({', '.join(details)})" if details else held
    return f"{text}, {model.kv_cache_tokens:,} tokens of KV cache" if model.kv_cache_tokens else text


def _row(model: RunningModelEntry, now: datetime) -> tuple[str, ...]:
    is_known = model.context_length > 0
    return (
        model.name,
        format_bytes(model.size) if model.size else "shared" if model.pid and model.state == "ready" else "",
        model.device,
        _share_text(model),
        f"{model.kv_cache_tokens:,}" if model.kv_cache_tokens else "",
        f"{model.max_concurrency:.2f}x" if model.max_concurrency else "",
        f"{model.context_length:,}" if is_known else "",
        f"{model.num_running}/{model.num_waiting}",
        model.state,
        until_text(model, now),
    )


def _share_text(model: RunningModelEntry) -> str:
    """The share that somebody gave, else the part that the model holds."""
    if model.share is not None:
        return f"{model.share:.2f}"
    return f"{model.share_in_force:.2f}" if model.share_in_force else ""


def _in_text(seconds: float) -> str:
    """To the nearest unit: what has 29 min 59 s left has 30 min."""
    for unit_s, most, unit in ((1, 119, "s"), (60, 119, "min"), (3600, 47, "h")):
        if round(seconds / unit_s) <= most:
            return f"in {max(0, round(seconds / unit_s))} {unit}"
    return f"in {round(seconds / 86400)} d"
