"""Bodies of the routes about models in memory: ps, load, share, pin, sleep, wake, events.  No behaviour.

Field names are Ollama's where it has the same thing; sizes are in bytes, lengths in tokens, times RFC 3339.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from app.schema.admin import ModelRequest

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
"""A fraction of a device's memory."""

ModelStateName = Literal["waiting", "loading", "ready", "draining", "asleep", "failed"]


class LoadRequest(ModelRequest, frozen=True, forbid_unknown_fields=True):
    """What is given holds for a model that is in memory already, too; `keep_alive` is in Ollama's grammar."""

    share: Share | None = None
    pin: bool | None = None
    keep_alive: str | int | float | None = None


class ShareRequest(ModelRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    share: Share


class PinRequest(ModelRequest, frozen=True, forbid_unknown_fields=True):
    """A pinned model never leaves to make room, nor because nobody uses it."""

    pin: bool = True


class RunningModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One name under which a worker answers.

    `size` is what the model holds of its device, `size_vram` that of a GPU, `size_host` what it keeps in RAM while
    asleep.  Models of the same files share a worker, `pid`: the first of them has the sizes, the others 0.
    `share` is the part of the device that it was given, if any, `share_in_force` the part that it holds.
    `kv_cache_tokens` is the size of the KV cache and `kv_cache_usage` the part of it in use, 0 to 1.
    `num_running` are sequences being computed, `num_waiting` those in line.  `expires_at` is when the model leaves
    if nobody asks for it before; null while it is in use, pinned, or kept for ever (`keep_alive` -1).
    """

    name: str
    model: str
    state: ModelStateName
    size: int
    size_vram: int
    size_host: int
    digest: str
    device: str
    share: float | None
    share_in_force: float
    pinned: bool
    keep_alive: str | None
    expires_at: str | None
    context_length: int
    kv_cache_tokens: int
    kv_cache_usage: float
    max_concurrency: float
    num_requests: int
    num_running: int
    num_waiting: int
    task: str
    dtype: str
    architecture: str
    loaded_at: str | None
    pid: int | None
    note: str = ""
    notes: tuple[str, ...] = ()


class DeviceSplit(msgspec.Struct, frozen=True, kw_only=True):
    """How one device's memory is split: `models` and `others` (programs that are not Quire's) and what is `free`.

    `limit` is the part of `total` that Quire and the others may take together; the rest stays empty.
    """

    device: str
    total: int
    limit: float
    models: int
    others: int
    free: int


class RunningModels(msgspec.Struct, frozen=True):
    """Answer of GET /api/ps."""

    models: tuple[RunningModelEntry, ...]
    devices: tuple[DeviceSplit, ...] = ()


class StoppedModel(msgspec.Struct, frozen=True):
    """`stopped` is false when the model was not in memory."""

    stopped: bool


class ResidencyEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a model in memory, and `why` in one sentence; `number` counts from the daemon's start.

    `size` is what the model holds of `device` after it.
    """

    number: int
    at: str
    kind: str
    model: str
    why: str
    device: str = ""
    size: int = 0


class ResidencyEvents(msgspec.Struct, frozen=True):
    """Answer of GET /api/events, oldest first; with `follow` the events come as JSON lines instead."""

    events: tuple[ResidencyEvent, ...]
