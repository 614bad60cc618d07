"""What a user says and sees of models in memory, against a real daemon: residents, shares, sleep, events.

Engines are fakes, and memory is 16 GiB.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.command import quire
from tests.fakes.daemon import FakeDaemon, eventually, running_daemon, start_process
from tests.fakes.tiny_model import loads, write_tiny_model

MEMORY_BYTES = 16 * 2**30
MEMORY = {"QUIRE_TEST_MEMORY_BYTES": str(MEMORY_BYTES)}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    directory = tmp_path_factory.mktemp("residency")
    with running_daemon(directory, **MEMORY, QUIRE_MAX_KEEP_ALIVE="1h") as daemon:
        yield daemon


@pytest.fixture
async def http(daemon: FakeDaemon) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=30) as client:
        yield client


async def entry_of(http: httpx.AsyncClient, model: Path) -> dict[str, Any]:
    """The model as /api/ps lists it; empty if it does not."""
    models = (await http.get("/api/ps")).json()["models"]
    return next((entry for entry in models if entry["name"] == str(model)), {})


async def is_in(http: httpx.AsyncClient, model: Path, state: str) -> bool:
    return (await entry_of(http, model)).get("state") == state


async def load(http: httpx.AsyncClient, model: Path, **options: Any) -> list[dict[str, Any]]:
    response = await http.post("/api/load", json={"model": str(model), **options})
    return [json.loads(line) for line in response.text.splitlines()]


async def events_of(http: httpx.AsyncClient, model: Path | str) -> list[dict[str, Any]]:
    events = (await http.get("/api/events")).json()["events"]
    return [event for event in events if event["model"] == str(model)]


async def chat(http: httpx.AsyncClient, model: Path, **fields: Any) -> httpx.Response:
    body = {"model": str(model), "messages": [{"role": "user", "content": "hello"}], **fields}
    return await http.post("/v1/chat/completions", json=body)


async def test_residents_are_loaded_at_start_and_one_that_is_missing_stops_nobody(tmp_path: Path) -> None:
    slow = write_tiny_model(tmp_path / "slow", behaviour={"load_delay_s": 0.5})
    quick = write_tiny_model(tmp_path / "quick")
    residents = f"{slow}=0.5, {tmp_path / 'absent'}, {quick}"

    with running_daemon(tmp_path / "daemon", **MEMORY, QUIRE_RESIDENTS=residents) as daemon:
        async with httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=30) as http:
            await eventually(lambda: is_in(http, slow, "loading"))
            await eventually(lambda: is_in(http, quick, "ready"))
            assert (await entry_of(http, slow))["share"] == 0.5
            (failure,) = await events_of(http, tmp_path / "absent")
            events = (await http.get("/api/events")).json()["events"]

    assert failure["kind"] == "fail"
    assert "absent" in failure["why"]
    assert failure["why"] in daemon.log_text()
    assert [event["model"] for event in events if event["kind"] == "load"] == [str(slow), str(quick)]
    assert len(loads(slow)) == len(loads(quick)) == 1


def test_shares_that_cannot_be_kept_are_refused_at_start(tmp_path: Path) -> None:
    process, log = start_process(tmp_path, QUIRE_RESIDENTS="qwen3:4b=0.65, smollm2:135m=0.35")

    assert process.wait(30) == 1
    assert log.read_text().splitlines()[-1] == (
        "Error: The resident models' shares of RAM come to 0.65 (qwen3:4b) + 0.35 (smollm2:135m) = 1, above the 0.92 "
        "that memory_limit allows; lower a share or leave a model out."
    )


async def test_a_model_is_loaded_as_it_is_wanted(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "wanted")

    assert (await load(http, model, share=0.25, pin=True, keep_alive="20m"))[-1] == {"status": "success"}
    entry = await entry_of(http, model)
    assert (entry["state"], entry["share"], entry["pinned"], entry["keep_alive"]) == ("ready", 0.25, True, "20m")
    assert entry["expires_at"] is None

    await load(http, model, pin=False, keep_alive=-1)
    entry = await entry_of(http, model)
    assert (entry["share"], entry["pinned"], entry["keep_alive"]) == (0.25, False, "1h")
    assert datetime.fromisoformat(entry["expires_at"]) > datetime.now(UTC)
    assert len(loads(model)) == 1
    assert (await http.post("/api/stop", json={"model": str(model)})).json() == {"stopped": True}


async def test_devices_are_split_into_models_others_and_free(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "holds")
    await load(http, model, share=0.25)

    running = (await http.get("/api/ps")).json()

    (device,) = running["devices"]
    assert (device["device"], device["total"], device["limit"]) == ("cpu", MEMORY_BYTES, 0.92)
    assert device["models"] == sum(entry["size"] for entry in running["models"]) > 0
    assert device["models"] + device["others"] + device["free"] == int(MEMORY_BYTES * 0.92)
    await http.post("/api/stop", json={"model": str(model)})


async def test_a_share_and_a_pin_are_changed_in_place(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "changed")
    await load(http, model)

    shared = await http.post("/api/share", json={"model": str(model), "share": 0.3})
    pinned = await http.post("/api/pin", json={"model": str(model)})

    assert (shared.status_code, shared.json()["share"]) == (200, 0.3)
    assert (pinned.status_code, pinned.json()["pinned"]) == (200, True)
    assert len(loads(model)) == 1
    await http.post("/api/stop", json={"model": str(model)})


async def test_a_model_sleeps_and_wakes(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "sleeper")
    await load(http, model)

    asleep = await http.post("/api/sleep", json={"model": str(model)})
    awake = await http.post("/api/wake", json={"model": str(model)})

    assert (asleep.status_code, asleep.json()["state"]) == (200, "asleep")
    assert (awake.status_code, awake.json()["state"]) == (200, "ready")
    assert len(loads(model)) == 1
    assert [event["kind"] for event in await events_of(http, model)][:4] == ["load", "ready", "sleep", "wake"]
    await http.post("/api/stop", json={"model": str(model)})


@pytest.mark.parametrize("route", ["share", "pin", "sleep", "wake"])
async def test_what_is_not_in_memory_cannot_be_changed(http: httpx.AsyncClient, tmp_path: Path, route: str) -> None:
    model = write_tiny_model(tmp_path / "absent")
    share = {"share": 0.3} if route == "share" else {}

    refused = await http.post(f"/api/{route}", json={"model": str(model), **share})

    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_not_loaded")
    assert "quire load" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("load", {"share": 0}, "share"),
        ("load", {"keep_alive": "soon"}, "keep_alive"),
        ("load", {"shore": 0.5}, "shore"),
        ("share", {}, "share"),
        ("share", {"share": 1.5}, "share"),
        ("pin", {"pin": "yes"}, "pin"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(
    http: httpx.AsyncClient, tmp_path: Path, route: str, fields: dict[str, Any], param: str
) -> None:
    refused = await http.post(f"/api/{route}", json={"model": str(tmp_path), **fields})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_keep_alive_of_a_request(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "kept")

    assert (await chat(http, model, keep_alive="-1")).status_code == 200
    assert (await entry_of(http, model))["keep_alive"] == "1h"
    assert (await chat(http, model, keep_alive=0)).status_code == 200

    async def is_gone() -> bool:
        return not await entry_of(http, model)

    await eventually(is_gone)
    assert (await events_of(http, model))[-1]["kind"] == "unload"


async def test_events_are_followed_until_the_daemon_ends(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with running_daemon(tmp_path / "daemon", **MEMORY) as daemon:
        async with httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=30) as http:

            async def follow() -> list[str]:
                async with http.stream("GET", "/api/events?follow=true") as response:
                    return [json.loads(line)["kind"] async for line in response.aiter_lines() if line.strip()]

            following = asyncio.create_task(follow())
            await load(http, model)
            daemon.process.send_signal(signal.SIGTERM)
            kinds = await asyncio.wait_for(following, 10)

    assert kinds[:2] == ["load", "ready"]


def test_the_commands(daemon: FakeDaemon, tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "commanded"))

    loaded = quire(daemon, "load", model, "--share", "0.2", "--pin")
    assert (loaded.returncode, loaded.stdout) == (0, "")
    assert loaded.stderr.splitlines()[-1].startswith(f"{model} is ready: ")
    assert "(share 0.20, pinned)" in loaded.stderr

    table = quire(daemon, "ps")
    assert table.returncode == 0
    assert any("ready" in line and "pinned" in line for line in table.stdout.splitlines())
    assert any(line.startswith("RAM  [") for line in table.stdout.splitlines())

    assert quire(daemon, "share", model, "0.3").stderr.startswith(f"{model} has ")
    assert quire(daemon, "sleep", model).stderr.startswith(f"{model} sleeps")
    assert quire(daemon, "wake", model).stderr.startswith(f"{model} is ready: ")
    told = quire(daemon, "events").stdout.splitlines()
    assert any("load" in line and model in line for line in told)
    assert quire(daemon, "stop", model).stderr == f"Unloaded {model}.\n"
    absent = quire(daemon, "share", model, "0.3")
    assert (absent.returncode, absent.stdout) == (1, "")
    assert "is not in memory" in absent.stderr
