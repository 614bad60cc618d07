"""Does concurrency pay?  Output tokens/s of one stream against many, over HTTP, in one run.

    python benchmarks/concurrency.py [--model starter] [--streams 16] [--base-url http://127.0.0.1:11435]

Needs a running daemon.  Rounds of one stream and of many alternate, so that a noisy machine
disturbs both alike; the ratio of medians is the figure.  Then a short request is sent while
eight long ones decode, and its time to first token is reported.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass

import httpx

PROMPT = "Write a long story about a lighthouse keeper, a storm, and the ship that came too late. Part {part}."
NUM_BACKGROUND_STREAMS = 8


@dataclass(frozen=True)
class StreamResult:
    """One stream: tokens generated and seconds until the first of them."""

    num_tokens: int
    first_token_s: float


async def stream(client: httpx.AsyncClient, model: str, part: int, max_tokens: int) -> StreamResult:
    """Stream one completion to its end."""
    body = {
        "model": model,
        "prompt": PROMPT.format(part=part),
        "max_tokens": max_tokens,
        "temperature": 0.8,
        "seed": part,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first_token_s, num_tokens = 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            if event["choices"] and not first_token_s:
                first_token_s = time.perf_counter() - started
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    return StreamResult(num_tokens, first_token_s)


async def tokens_per_second(client: httpx.AsyncClient, model: str, num_streams: int, max_tokens: int) -> float:
    started = time.perf_counter()
    results = await asyncio.gather(*(stream(client, model, part, max_tokens) for part in range(num_streams)))
    return sum(result.num_tokens for result in results) / (time.perf_counter() - started)


async def short_request_first_token_s(client: httpx.AsyncClient, model: str) -> float:
    """Time to first token of a short request that arrives while long ones decode."""
    background = [asyncio.create_task(stream(client, model, 100 + part, 128)) for part in range(NUM_BACKGROUND_STREAMS)]
    await asyncio.sleep(2.0)
    result = await stream(client, model, 999, 4)
    await asyncio.gather(*background)
    return result.first_token_s


async def measure(arguments: argparse.Namespace) -> dict[str, float | str | int]:
    async with httpx.AsyncClient(base_url=arguments.base_url, timeout=600, trust_env=False) as client:
        await stream(client, arguments.model, 0, 4)
        single, together = [], []
        for round_number in range(arguments.rounds):
            single.append(await tokens_per_second(client, arguments.model, 1, arguments.max_tokens))
            together.append(await tokens_per_second(client, arguments.model, arguments.streams, arguments.max_tokens))
            rates = f"1 stream {single[-1]:6.1f} tok/s, {arguments.streams} streams {together[-1]:6.1f} tok/s"
            print(f"round {round_number + 1}: {rates}")
        first_token_s = await short_request_first_token_s(client, arguments.model)
    print(f"short request among {NUM_BACKGROUND_STREAMS} long ones: first token after {first_token_s:.2f} s")
    return {
        "benchmark": "concurrency",
        "model": arguments.model,
        "streams": arguments.streams,
        "max_tokens": arguments.max_tokens,
        "single_tokens_per_s": round(statistics.median(single), 1),
        "concurrent_tokens_per_s": round(statistics.median(together), 1),
        "ratio": round(statistics.median(together) / statistics.median(single), 2),
        "short_request_first_token_s": round(first_token_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Output tokens/s of one stream against many.")
    parser.add_argument("--model", default="starter")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--base-url", default="http://127.0.0.1:11435")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
