"""Real workers behind a real daemon on a machine with little memory: models take turns, and KV cache moves."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx

from benchmarks.turns import ask_all
from tests.fakes.checkpoints import write_hf_checkpoint, write_tokenizer
from tests.fakes.daemon import FakeDaemon, eventually, running_daemon

MIB = 2**20
LARGE_CACHE = {"max_position_embeddings": 2048, "num_hidden_layers": 16}
"""8 KiB of KV cache for each token, so that a few prompts fill it."""
WANTED_TOKENS = 4 * 2048
"""What a model gets before anything is known of its traffic: four conversations that fill its context."""


def write_model(directory: Path, seed: int, **config: Any) -> str:
    write_hf_checkpoint(directory, "qwen3", seed=seed, **config)
    write_tokenizer(directory)
    return str(directory)


def real_workers(directory: Path, memory_bytes: int) -> Any:
    return running_daemon(
        directory,
        QUIRE_DEVICE="cpu",
        QUIRE_TEST_REAL_WORKERS="1",
        QUIRE_TEST_MEMORY_BYTES=str(memory_bytes),
        QUIRE_CODE_CACHE=os.environ["QUIRE_CODE_CACHE"],
    )


def client_of(daemon: FakeDaemon) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=120, limits=limits)


async def test_four_models_asked_for_in_a_random_order_where_two_fit(tmp_path: Path) -> None:
    models = [write_model(tmp_path / f"model-{number}", number) for number in range(4)]
    with real_workers(tmp_path / "daemon", 450 * MIB) as daemon:
        async with client_of(daemon) as http:
            figures = await ask_all(http, models, num_clients=12, num_requests=2)
            resident = (await http.get("/api/ps")).json()["models"]

    assert figures["errors"] == {}
    assert figures["answers"] == 24
    assert len([entry for entry in resident if entry["state"] == "ready"]) == 2
    # Nobody is loaded for a single answer while others wait for it too.
    assert 4 <= figures["loads"] <= 12, figures


async def test_a_busy_model_borrows_what_an_idle_one_does_not_use_until_that_is_used_again(tmp_path: Path) -> None:
    busy, idle = (write_model(tmp_path / name, number, **LARGE_CACHE) for number, name in enumerate(("busy", "idle")))
    with real_workers(tmp_path / "daemon", 560 * MIB) as daemon:
        async with client_of(daemon) as http:
            for model in (busy, idle):
                await ask(http, model, "hello")
            before = await resident_models(http)

            crowd = Crowd(http, busy)
            await eventually(lambda: has_lent(http, idle), within_s=60)
            lent = await resident_models(http)
            await crowd.stop()
            await eventually(lambda: has_its_own(http, idle), within_s=30)
            after = await resident_models(http)
            events = (await http.get("/api/events")).json()["events"]

    assert crowd.num_answers >= 12
    assert tokens_of(before, idle) >= WANTED_TOKENS > tokens_of(lent, idle)
    assert tokens_of(lent, busy) > tokens_of(before, busy)
    assert {name: entry["pid"] for name, entry in after.items()} == {name: one["pid"] for name, one in before.items()}
    assert {event["kind"] for event in events} == {"load", "ready", "resize"}


class Crowd:
    """Long prompts for one model, one after the other from each of many clients, until told to stop."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self.num_answers = 0
        self._is_over = False
        self._clients = [asyncio.create_task(self._ask(http, model, number)) for number in range(12)]

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._clients)

    async def _ask(self, http: httpx.AsyncClient, model: str, number: int) -> None:
        while not self._is_over:
            await ask(http, model, f"{number} {self.num_answers} {text_of(1800)}", max_tokens=32)
            self.num_answers += 1


def text_of(num_characters: int) -> str:
    """Of which the tokenizer makes about as many tokens."""
    return "".join(chr(ord("0") + (number * number + number // 7) % 10) for number in range(num_characters))


async def ask(http: httpx.AsyncClient, model: str, text: str, *, max_tokens: int = 8) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def resident_models(http: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in (await http.get("/api/ps")).json()["models"]}


def tokens_of(models: dict[str, dict[str, Any]], name: str) -> int:
    tokens: int = models[name]["kv_cache_tokens"]
    return tokens


async def has_lent(http: httpx.AsyncClient, name: str) -> bool:
    return tokens_of(await resident_models(http), name) < WANTED_TOKENS


async def has_its_own(http: httpx.AsyncClient, name: str) -> bool:
    """Whether a model has what it lent, now that it is used again."""
    await ask(http, name, text_of(1800))
    return tokens_of(await resident_models(http), name) >= WANTED_TOKENS
