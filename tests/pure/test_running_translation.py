"""What the supervisor says of models, devices and events → what clients read."""

from __future__ import annotations

import math
from typing import Any

from app.residency.events import Event
from app.residency.model_state import ModelState
from app.translate.running import device_split, event_entry, running_entries


def state(*names: str, **fields: Any) -> ModelState:
    facts: dict[str, Any] = {"state": "ready", "digest": "d", "device": "cuda:0", "size_bytes": 100, "host_bytes": 7}
    return ModelState(names=names, **{**facts, **fields})


def test_names_of_one_worker_share_its_memory() -> None:
    first, second = running_entries(state("m", "teacher", notes=("short of memory",), pid=5))

    assert (first.name, first.size, first.size_vram, first.size_host, first.notes) == (
        "m",
        100,
        100,
        7,
        ("short of memory",),
    )
    assert (second.name, second.model, second.size, second.size_vram, second.size_host) == (
        "teacher",
        "teacher",
        0,
        0,
        0,
    )
    assert second.notes == ("shares its worker with m", "short of memory")
    assert second.pid == first.pid == 5


def test_times_and_durations_are_texts() -> None:
    (entry,) = running_entries(state("m", until=0.0, keep_alive_s=5400.0, loaded_at=1.0))
    assert (entry.expires_at, entry.keep_alive, entry.loaded_at) == (
        "1970-01-01T00:00:00Z",
        "1h30m",
        "1970-01-01T00:00:01Z",
    )

    (entry,) = running_entries(state("m", keep_alive_s=math.inf))
    assert (entry.expires_at, entry.keep_alive, entry.loaded_at) == (None, "-1", None)


def test_what_is_in_ram_is_not_on_a_gpu() -> None:
    (entry,) = running_entries(state("m", device="cpu"))
    assert (entry.size, entry.size_vram) == (100, 0)


def test_a_device_is_split_among_models_others_and_nobody() -> None:
    states = [state("a"), state("b", size_bytes=300), state("c", device="cpu", size_bytes=5)]

    split = device_split("cuda:0", total_bytes=1000, others_bytes=50, limit=0.9, states=states)

    assert (split.models, split.others, split.free) == (400, 50, 450)
    crowded = device_split("cuda:0", total_bytes=1000, others_bytes=600, limit=0.9, states=states)
    assert crowded.free == 0


def test_an_event_keeps_its_reason() -> None:
    event = Event(number=3, at=0.0, kind="evict", model="m", why="Idle for 12 min.", device="cpu", size_bytes=5)

    entry = event_entry(event)

    assert (entry.number, entry.at, entry.kind, entry.why) == (3, "1970-01-01T00:00:00Z", "evict", "Idle for 12 min.")
    assert (entry.model, entry.device, entry.size) == ("m", "cpu", 5)
