"""Pulling, listing and deleting models through the daemon, from a hub on the loopback interface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.daemon import FakeDaemon, eventually, running_daemon
from tests.fakes.hub import FakeHub
from tests.fakes.tiny_model import write_tiny_model

NAME = "org/tiny"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    model = write_tiny_model(tmp_path / "source")
    with FakeHub() as hub:
        hub.add(NAME, {file.name: file.read_bytes() for file in model.iterdir()})
        yield hub


@pytest.fixture
def daemon(tmp_path: Path, hub: FakeHub) -> Iterator[FakeDaemon]:
    with running_daemon(tmp_path / "daemon", HF_ENDPOINT=hub.endpoint, HF_TOKEN_PATH=str(tmp_path / "token")) as daemon:
        yield daemon


@pytest.fixture
async def http(daemon: FakeDaemon) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=30) as client:
        yield client


async def pull(http: httpx.AsyncClient, name: str = NAME, **options: Any) -> list[dict[str, Any]]:
    response = await http.post("/api/pull", json={"model": name, **options})
    return [json.loads(line) for line in response.text.splitlines()]


async def test_a_model_is_pulled_listed_used_and_deleted(http: httpx.AsyncClient) -> None:
    lines = await pull(http)

    assert lines[-1] == {"status": "success"}
    assert any(line.get("file") == "model.safetensors" and line.get("total", 0) > 0 for line in lines)
    (entry,) = (await http.get("/api/tags")).json()["models"]
    assert entry["name"] == NAME
    assert entry["details"]["family"] == "llama"
    assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == [NAME]
    assert (await http.get(f"/v1/models/{NAME}")).json()["id"] == NAME

    body = {"model": NAME.upper(), "messages": [{"role": "user", "content": "hello"}]}
    assert (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"] == "hello"
    refused = await http.request("DELETE", "/api/delete", json={"model": NAME})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_in_use")

    await http.post("/api/stop", json={"model": NAME})
    deleted = await http.request("DELETE", "/api/delete", json={"model": NAME})
    assert deleted.json()["freed_bytes"] > 0
    assert (await http.get("/api/tags")).json() == {"models": []}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 404


async def test_a_pull_of_an_unknown_model_ends_with_an_error(http: httpx.AsyncClient) -> None:
    lines = await pull(http, "org/missing")

    assert lines[-1]["error"]["code"] == "model_not_found"


async def test_options_of_a_pull(http: httpx.AsyncClient, hub: FakeHub) -> None:
    lines = await pull(http, offline=True)
    assert lines[-1]["error"]["code"] == "hub_unreachable"
    assert hub.requests == []
    for option in ({"limit_bytes_per_s": 0}, {"limit_rate": "10M"}):
        assert (await http.post("/api/pull", json={"model": NAME, **option})).status_code == 400
    assert (await pull(http, limit_bytes_per_s=10**8))[-1] == {"status": "success"}
    assert (await pull(http, offline=True))[-1] == {"status": "success"}


async def test_a_login_counts_without_a_new_daemon(http: httpx.AsyncClient, hub: FakeHub, tmp_path: Path) -> None:
    hub.repos[NAME].gated = True
    hub.faults.required_token = "hf_right"
    assert (await pull(http))[-1]["error"]["code"] == "access_denied"
    (tmp_path / "token").write_text("hf_right")
    assert (await pull(http))[-1] == {"status": "success"}


async def test_a_client_that_leaves_stops_the_download(http: httpx.AsyncClient, hub: FakeHub) -> None:
    hub.faults.stall_after_bytes = [0] * 8
    request = asyncio.create_task(http.post("/api/pull", json={"model": NAME}))

    async def is_stalled() -> bool:
        return hub.stalled.is_set()

    await eventually(is_stalled)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    hub.faults.stall_after_bytes = []
    hub.released.set()

    assert (await pull(http))[-1] == {"status": "success"}
