"""The life of models and of the daemon itself: loads, evictions, crashes, shutdown.  Engines are fakes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.daemon import FakeDaemon, eventually, running_daemon, start_process
from tests.fakes.tiny_model import loads, write_tiny_model

MIB = 2**20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    """Keep-alive frames come fast, and memory is 4 GiB, of which models may use 0.92."""
    directory = tmp_path_factory.mktemp("daemon")
    with running_daemon(
        directory, QUIRE_KEEP_ALIVE_INTERVAL_S="0.1", QUIRE_TEST_MEMORY_BYTES=str(4096 * MIB)
    ) as daemon:
        yield daemon


@pytest.fixture
async def http(daemon: FakeDaemon) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=30) as client:
        yield client


def chat(model: Path, text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": str(model), "messages": [{"role": "user", "content": text}], **fields}


async def ask(http: httpx.AsyncClient, model: Path, **fields: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=chat(model, **fields))


async def started(model: Path) -> bool:
    return bool(loads(model))


async def resident_names(http: httpx.AsyncClient) -> set[str]:
    return {entry["name"] for entry in (await http.get("/api/ps")).json()["models"]}


def wait_until_gone(pid: int, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


async def test_requests_for_one_cold_model_share_one_load(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "cold", behaviour={"load_delay_s": 0.3})

    answers = await asyncio.gather(*(ask(http, model) for _ in range(3)))

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert len(loads(model)) == 1


async def test_other_models_answer_while_one_loads(http: httpx.AsyncClient, tmp_path: Path) -> None:
    warm = write_tiny_model(tmp_path / "warm")
    slow = write_tiny_model(tmp_path / "slow", behaviour={"load_delay_s": 20})
    await ask(http, warm)
    loading = asyncio.create_task(ask(http, slow))
    await eventually(lambda: started(slow))

    assert (await ask(http, warm)).status_code == 200
    health = (await http.get("/health")).json()
    assert {"name": str(slow), "state": "loading"} in health["models"]
    assert (await http.post("/api/stop", json={"model": str(slow)})).json() == {"stopped": True}
    assert (await loading).status_code == 503
    wait_until_gone(loads(slow)[0][0])


async def test_a_failed_load_is_told_to_all_and_tried_again(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(
        tmp_path / "broken", behaviour={"load_delay_s": 0.2, "load_error": ["broken_checkpoint", "It lacks tensors."]}
    )

    answers = await asyncio.gather(ask(http, model), ask(http, model))

    assert [answer.status_code for answer in answers] == [422, 422]
    assert answers[0].json()["error"]["message"] == "It lacks tensors."
    assert len(loads(model)) == 1
    (model / "fake_worker.json").unlink()
    assert (await ask(http, model)).status_code == 200


async def test_a_worker_that_dies_while_loading_is_explained(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "dying", behaviour={"die_while_loading": True})

    error = (await ask(http, model)).json()["error"]

    assert error["code"] == "worker_died"
    assert "exit code 9" in error["message"]


async def test_a_killed_worker_ends_each_stream_with_one_error(
    daemon: FakeDaemon, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "killed", behaviour={"step_delay_s": 0.01})
    body = chat(model, "abc " * 10, stream=True, ignore_eos=True, max_tokens=400)

    async def read_all() -> list[str]:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            return [line async for line in response.aiter_lines() if line.startswith("data: ")]

    streams = [asyncio.create_task(read_all()) for _ in range(3)]
    whole = asyncio.create_task(ask(http, model, ignore_eos=True, max_tokens=400))

    async def all_running() -> bool:
        models = (await http.get("/api/ps")).json()["models"]
        return sum(entry["num_requests"] for entry in models) == 4 and models[-1]["kv_cache_usage"] > 0

    await eventually(all_running)
    (pid, _) = loads(model)[0]
    os.kill(pid, signal.SIGKILL)

    for lines in await asyncio.gather(*streams):
        assert lines[-1] == "data: [DONE]"
        errors = [line for line in lines if '"error"' in line]
        assert len(errors) == 1
        assert errors[0] == lines[-2]
        assert json.loads(errors[0].removeprefix("data: "))["error"]["code"] == "worker_died"
    assert (await whole).status_code == 503
    (model / "fake_worker.json").unlink()
    assert (await ask(http, model)).json()["choices"][0]["message"]["content"] == "hello"
    assert len(loads(model)) == 2
    assert "SIGKILL" in daemon.log_text()


async def test_keep_alive_frames_fill_a_long_wait(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "waiting", behaviour={"load_delay_s": 0.5})

    response = await ask(http, model, stream=True)

    assert response.text.startswith(": ping\n\n")
    assert response.text.endswith("data: [DONE]\n\n")


async def test_the_least_recently_used_idle_model_makes_room(http: httpx.AsyncClient, tmp_path: Path) -> None:
    # Each takes 1,100 MiB of the 3,768 MiB that models may have together.
    names = ("first", "second", "third", "fourth")
    first, second, third, fourth = (
        write_tiny_model(tmp_path / name, behaviour={"fixed_bytes": 1100 * MIB}, weight_bytes=1100 * MIB)
        for name in names
    )
    for name in await resident_names(http):
        await http.post("/api/stop", json={"model": name})
    for model in (first, second, third, first):
        assert (await ask(http, model)).status_code == 200

    assert (await ask(http, fourth)).status_code == 200

    assert await resident_names(http) == {str(first), str(third), str(fourth)}
    assert [len(loads(model)) for model in (first, second, third, fourth)] == [1, 1, 1, 1]
    assert all(budget <= 3768 * MIB - 2 * 1100 * MIB for model in (third, fourth) for _, budget in loads(model))


async def test_a_worker_that_needs_more_than_was_planned_gets_more(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "surprising", behaviour={"fixed_bytes": 600 * MIB}, weight_bytes=MIB)

    assert (await ask(http, model)).status_code == 200

    budgets = [budget for _, budget in loads(model)]
    assert budgets[0] < 600 * MIB <= budgets[-1]
    assert budgets == sorted(budgets)


async def test_a_model_that_fits_nowhere_is_refused(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "huge", weight_bytes=8000 * MIB)

    response = await ask(http, model)

    assert response.status_code == 507
    assert response.json()["error"]["code"] == "insufficient_memory"
    assert "choose a smaller" in response.json()["error"]["message"]
    assert loads(model) == []


async def test_loading_reports_progress_until_ready(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "reported", behaviour={"load_delay_s": 0.1})

    response = await http.post("/api/load", json={"model": str(model)})

    lines = [json.loads(line) for line in response.text.splitlines()]
    assert {"status": "loading weights", "total": 2, "completed": 2} in lines
    assert lines[-1] == {"status": "success"}
    assert str(model) in await resident_names(http)


async def test_stopping_ends_the_worker(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "stopped")
    await ask(http, model)

    assert (await http.post("/api/stop", json={"model": str(model)})).json() == {"stopped": True}

    assert str(model) not in await resident_names(http)
    wait_until_gone(loads(model)[0][0])
    assert (await http.post("/api/stop", json={"model": str(model)})).json() == {"stopped": False}


async def test_files_that_were_never_pulled_are_not_deleted(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "kept")
    await ask(http, model)

    response = await http.request("DELETE", "/api/delete", json={"model": str(model)})

    assert response.status_code == 400
    assert "only models that were pulled are deleted" in response.json()["error"]["message"]
    assert (model / "config.json").exists()


async def test_show_and_tags(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "shown")

    card = (await http.post("/api/show", json={"model": str(model)})).json()

    assert card["details"]["family"] == "llama"
    assert card["has_chat_template"] is True
    assert (await http.get("/api/tags")).json() == {"models": []}
    assert (await http.get("/v1/models")).json() == {"object": "list", "data": []}
    assert (await http.get("/v1/models/nobody/nothing")).status_code == 404


async def test_a_pull_that_cannot_work_says_why(http: httpx.AsyncClient) -> None:
    response = await http.post("/api/pull", json={"model": "no such name"})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_model_name"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": ""}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
        ({"host": "localhost:1"}, 200),
    ],
)
async def test_foreign_names_are_refused(http: httpx.AsyncClient, headers: dict[str, str], status: int) -> None:
    assert (await http.get("/version", headers=headers)).status_code == status


def test_an_api_key_guards_every_route(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, QUIRE_API_KEY="secret") as daemon,
        httpx.Client(base_url=daemon.base_url, trust_env=False) as client,
    ):
        refused = [client.get(path) for path in ("/v1/models", "/api/ps", "/metrics", "/health", "/schema")]
        wrong = client.get("/health", headers={"authorization": "Bearer wrong"})
        right = client.get("/health", headers={"authorization": "Bearer secret"})

    assert {response.status_code for response in refused} == {401}
    assert refused[0].json()["error"]["code"] == "invalid_api_key"
    assert (wrong.status_code, right.status_code) == (401, 200)


def test_workers_exit_when_the_daemon_is_killed(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "orphan")
    with running_daemon(tmp_path / "daemon") as daemon:
        httpx.post(f"{daemon.base_url}/v1/chat/completions", json=chat(model), trust_env=False)
        daemon.process.kill()
        wait_until_gone(loads(model)[0][0])
    with running_daemon(tmp_path / "daemon") as daemon:
        assert httpx.get(f"{daemon.base_url}/health", trust_env=False).status_code == 200


def test_shutdown_ends_workers_and_removes_the_record(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with running_daemon(tmp_path / "daemon") as daemon:
        httpx.post(f"{daemon.base_url}/v1/chat/completions", json=chat(model), trust_env=False)

        response = httpx.post(f"{daemon.base_url}/api/shutdown", trust_env=False)

        assert response.status_code == 202
        assert daemon.process.wait(15) == 0
        wait_until_gone(loads(model)[0][0])
        assert not (daemon.state_dir / "daemon.json").exists()
        assert list((daemon.state_dir / "run").iterdir()) == []


@pytest.mark.parametrize("stream", [False, True])
def test_open_answers_end_properly_at_shutdown(tmp_path: Path, stream: bool) -> None:
    model = write_tiny_model(tmp_path / "model", behaviour={"is_stalled": True})
    with running_daemon(tmp_path / "daemon", QUIRE_KEEP_ALIVE_INTERVAL_S="0.2") as daemon, ThreadPoolExecutor() as pool:
        url = f"{daemon.base_url}/v1/chat/completions"
        asking = pool.submit(httpx.post, url, json=chat(model, stream=stream), trust_env=False, timeout=30)
        is_open = False
        while not is_open:
            running = httpx.get(f"{daemon.base_url}/api/ps", trust_env=False).json()["models"]
            is_open = any(entry["pid"] and entry["num_requests"] == 1 for entry in running)
            time.sleep(0.02)
        daemon.process.terminate()
        answer = asking.result()

        assert daemon.process.wait(15) == 0
        assert "Traceback" not in daemon.log_text()
    assert "The daemon is shutting down." in answer.text
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.status_code == 503


def test_a_second_daemon_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        process, log = start_process(tmp_path)

        assert process.wait(15) == 1
        assert f"Error: A daemon is already running (process {daemon.process.pid}" in log.read_text()
        assert "Traceback" not in log.read_text()


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        process, log = start_process(tmp_path, QUIRE_PORT=str(port))

        assert process.wait(15) == 1
    assert log.read_text().startswith(f"Error: Cannot listen on 127.0.0.1 port {port}: address already in use;")
