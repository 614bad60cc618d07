"""`quire ps`: a row for each model and a bar for each device, within the width of a terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cli.output import display_width
from app.cli.running_table import description, notes_of, running_lines, split_lines, until_text
from app.schema.residency import DeviceSplit, RunningModelEntry

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
GB = 10**9


def entry(name: str = "qwen3:4b", **fields: Any) -> RunningModelEntry:
    facts: dict[str, Any] = {
        "state": "ready",
        "size": 98 * GB,
        "size_vram": 98 * GB,
        "size_host": 0,
        "digest": "d",
        "device": "cuda:0",
        "share": 0.65,
        "share_in_force": 0.65,
        "pinned": False,
        "keep_alive": "30m",
        "expires_at": "2026-01-01T12:29:30Z",
        "context_length": 131072,
        "kv_cache_tokens": 1_426_448,
        "kv_cache_usage": 0.5,
        "max_concurrency": 10.88,
        "num_requests": 12,
        "num_running": 8,
        "num_waiting": 4,
        "task": "generate",
        "dtype": "bfloat16",
        "architecture": "qwen3",
        "loaded_at": "2026-01-01T11:00:00Z",
        "pid": 5,
    }
    return RunningModelEntry(name=name, model=name, **{**facts, **fields})


def test_a_row_says_everything() -> None:
    header, row = running_lines([entry()], 200, now=NOW)

    assert header == (
        "NAME      SIZE     DEVICE  SHARE  KV TOKENS  MAX CONCURRENCY  CONTEXT  RUNNING/WAITING  STATE  UNTIL"
    )
    assert row == (
        "qwen3:4b  98.0 GB  cuda:0  0.65   1,426,448  10.88x           131,072  8/4              ready  in 30 min"
    )


def test_a_narrow_terminal_gets_short_headings_and_then_short_names() -> None:
    models = [entry(), entry("Qwen/Qwen3-Embedding-0.6B-GGUF:Q4_K_M", state="draining")]

    lines = running_lines(models, 100, now=NOW)

    assert max(map(display_width, lines)) <= 100
    assert "KV TOKENS  MAX CONC  CONTEXT  RUN/WAIT" in lines[0]
    assert lines[2].startswith("…")
    assert "GGUF:Q4_K_M  98.0 GB" in lines[2]


@given(st.lists(st.text("模q3:-/", min_size=1, max_size=60), max_size=4))
@pytest.mark.parametrize("num_columns", [100, 80, 60])
def test_any_names_fit_a_terminal(num_columns: int, names: list[str]) -> None:
    lines = running_lines([entry(name) for name in names], num_columns, now=NOW)

    assert len(lines) == 1 + len(names)
    assert max(map(display_width, lines)) <= num_columns


def test_a_pipe_takes_every_name_whole() -> None:
    name = "Qwen/Qwen3-Embedding-0.6B-GGUF:Q4_K_M"

    assert name in running_lines([entry(name)], None, now=NOW)[1]


def test_the_narrower_a_terminal_the_fewer_columns() -> None:
    models = [entry(), entry("qwen3-embedding:0.6b")]

    titles = {width: running_lines(models, width, now=NOW)[0] for width in (100, 80, 60)}

    assert titles[100].split()[5:9] == ["TOKENS", "MAX", "CONC", "CONTEXT"]
    assert titles[80].split() == ["NAME", "SIZE", "SHARE", "KV", "TOKENS", "MAX", "CONC", "RUN/WAIT", "STATE", "UNTIL"]
    assert titles[60].split() == ["NAME", "SIZE", "RUN/WAIT", "STATE", "UNTIL"]


def test_what_is_not_known_yet_stays_empty() -> None:
    unknown = {"size": 0, "device": "", "share": None, "share_in_force": 0.0, "context_length": 0, "pid": None}
    counts = {"kv_cache_tokens": 0, "max_concurrency": 0.0, "num_requests": 1, "num_running": 0, "num_waiting": 1}

    _, row = running_lines([entry(state="loading", expires_at=None, **unknown, **counts)], 100, now=NOW)

    assert row.split() == ["qwen3:4b", "0/1", "loading"]


def test_a_second_name_of_a_worker_holds_nothing_of_its_own() -> None:
    assert "shared" in running_lines([entry(size=0)], 200, now=NOW)[1]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"expires_at": "2026-01-01T12:00:40Z"}, "in 40 s"),
        ({"expires_at": "2026-01-01T12:04:59Z"}, "in 5 min"),
        ({"expires_at": "2026-01-01T13:01:00Z"}, "in 61 min"),
        ({"expires_at": "2026-01-01T13:59:50Z"}, "in 2 h"),
        ({"expires_at": "2026-01-01T11:59:40Z"}, "in 0 s"),
        ({"expires_at": "2026-01-01T14:10:00Z"}, "in 2 h"),
        ({"expires_at": "2026-01-05T12:00:00Z"}, "in 4 d"),
        ({"expires_at": None, "pinned": True}, "pinned"),
        ({"expires_at": None}, "in use"),
        ({"expires_at": None, "num_requests": 0, "num_running": 0, "num_waiting": 0, "keep_alive": "-1"}, "for ever"),
    ],
)
def test_when_a_model_leaves(fields: dict[str, Any], text: str) -> None:
    assert until_text(entry(**fields), NOW) == text


def test_the_memory_of_a_device_as_a_bar() -> None:
    models = [entry(), entry("embedder", size=15 * GB), entry("elsewhere", device="cuda:1"), entry("gone", size=0)]
    device = DeviceSplit(device="cuda:0", total=150 * GB, limit=0.92, models=113 * GB, others=5 * GB, free=20 * GB)

    bar, *legend = split_lines(device, models, 100)

    assert bar.startswith("cuda:0  [####")
    assert bar.endswith("-]  150.0 GB")
    assert len(bar) == 100
    assert [bar.count(fill) > 0 for fill in "#=x.-+"] == [True, True, True, True, True, False]
    assert legend == [
        "        # qwen3:4b 98.0 GB   = embedder 15.0 GB   x other programs 5.0 GB   . free 20.0 GB",
        "        - above memory_limit 12.0 GB",
    ]


def test_an_empty_machine_has_a_bar_too() -> None:
    device = DeviceSplit(device="cpu", total=16 * GB, limit=0.92, models=0, others=16 * GB, free=0)

    assert split_lines(device, [], 80)[0].startswith("RAM  [xxxx")


def test_notes_tell_what_the_table_cannot() -> None:
    failed = entry("a", state="failed", note="its worker died; ask again.")
    refused = entry("c", state="failed", note="c needs more than there is.")
    asleep = entry("b", state="asleep", size_host=4 * GB)

    assert notes_of([failed, refused, asleep, entry()]) == [
        "a: its worker died; ask again.",
        "c needs more than there is.",
        "b sleeps, its weights in 4.0 GB of RAM.",
    ]


def test_a_model_in_one_sentence() -> None:
    assert description(entry(pinned=True)) == ("98.0 GB of cuda:0 (share 0.65, pinned), 1,426,448 tokens of KV cache")
    assert description(entry(device="cpu", kv_cache_tokens=0)) == "98.0 GB of RAM (share 0.65)"
