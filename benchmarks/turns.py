"""Many models, room for a few: clients ask for them in a random order, and every request must be answered.

    python benchmarks/turns.py --model A --model B ... [--clients 32] [--requests 8]

Asks the running daemon, whose `memory_limit` should leave room for some of the models only.  Each client asks one
question after the other, each of a model drawn at random.  Tells how often models were loaded and how long anybody
waited for an answer.  The last line is JSON; the exit code is 1 after an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

_ANSWER_TOKENS = 16


@dataclass
class Crowd:
    """What became of the requests; `errors` by what went wrong, `waits_s` from question to the end of its answer."""

    waits_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


async def ask_in_turn(http: httpx.AsyncClient, models: Sequence[str], crowd: Crowd) -> None:
    """One client: the models in this order, one after the other."""
    for model in models:
        messages = [{"role": "user", "content": "Name three colours."}]
        body = {"model": model, "messages": messages, "max_tokens": _ANSWER_TOKENS}
        sent_s = time.perf_counter()
        try:
            response = await http.post("/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            crowd.errors[type(error).__name__] += 1
            continue
        if response.status_code != 200 or not response.json()["usage"]["completion_tokens"]:
            crowd.errors[response.text[:300]] += 1
            continue
        crowd.waits_s.append(time.perf_counter() - sent_s)


async def ask_all(
    http: httpx.AsyncClient, models: Sequence[str], *, num_clients: int, num_requests: int, seed: int = 0
) -> dict[str, Any]:
    """Let all clients ask, and say what that took of the daemon."""
    rng, crowd = random.Random(seed), Crowd()
    last_event = max((event["number"] for event in await _events(http)), default=0)
    started_s = time.perf_counter()
    orders = [rng.choices(models, k=num_requests) for _ in range(num_clients)]
    await asyncio.gather(*(ask_in_turn(http, order, crowd) for order in orders))
    kinds = Counter(event["kind"] for event in await _events(http, last_event))
    return {
        "models": len(models),
        "clients": num_clients,
        "answers": len(crowd.waits_s),
        "loads": kinds["load"],
        "evictions": kinds["evict"] + kinds["sleep"],
        "drains": kinds["drain"],
        "answers_per_load": round(len(crowd.waits_s) / max(1, kinds["load"]), 1),
        "median_wait_s": round(float(np.median(crowd.waits_s or [0.0])), 2),
        "longest_wait_s": round(max(crowd.waits_s, default=0.0), 2),
        "took_s": round(time.perf_counter() - started_s, 1),
        "errors": dict(crowd.errors),
    }


async def _events(http: httpx.AsyncClient, after: int = 0) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = (await http.get("/api/events", params={"after": after})).json()["events"]
    return events


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=arguments.base_url, timeout=900.0, limits=limits) as http:
        return await ask_all(
            http,
            arguments.model,
            num_clients=arguments.clients,
            num_requests=arguments.requests,
            seed=arguments.seed,
        )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="More models than fit, asked for in a random order.")
    parser.add_argument("--base-url", default="http://127.0.0.1:11435")
    parser.add_argument("--model", action="append", required=True, help="repeat it for every model")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=8, help="of each client, one after the other")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main() -> None:
    figures = asyncio.run(measure(parse_arguments()))
    errors = figures.pop("errors")
    for name, value in figures.items():
        print(f"{name:24}{value:>12,}")
    for reason, number in errors.items():
        print(f"{number} x {reason}", file=sys.stderr)
    print(json.dumps({"benchmark": "turns", **figures, "errors": sum(errors.values())}))
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
