"""Do a chat model and an embedding model go together?  Streams and embedding clients at once, for a minute.

    python benchmarks/together.py --chat starter --embedder NAME [--seconds 60] [--streams 8] [--clients 8]

Asks the running daemon.  Each stream asks its next question when the last answer has ended; each client sends
batches of texts of mixed length one after the other.  Any answer that is not complete counts as an error, and a vector
must be the same, up to rounding, each time its text is sent.  The last line is JSON; the exit code is 1 after an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

_QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write a sentence about the sea.",
    "What is two plus three?",
)
_WORDS = (
    "paged",
    "engine",
    "memory",
    "model",
    "answer",
    "river",
    "light",
    "stone",
    "winter",
    "number",
    "question",
    "letter",
    "machine",
    "garden",
)
_ONCE_S = 0.1
_LARGEST_DRIFT = 1e-5
"""Cosine distance between two vectors of one text: what else is in a batch may change the last bits."""


@dataclass
class Count:
    """What has been answered so far; `errors` by what went wrong."""

    answers: int = 0
    answer_tokens: int = 0
    batches: int = 0
    texts: int = 0
    text_tokens: int = 0
    largest_drift: float = 0.0
    longest_wait_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)


async def ask(client: httpx.AsyncClient, model: str, deadline_s: float, count: Count, seed: int) -> None:
    """One stream: questions until the deadline."""
    rng = random.Random(seed)
    while time.perf_counter() < deadline_s:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": rng.choice(_QUESTIONS)}],
            "max_tokens": 64,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s, first_s, usage, is_done = time.perf_counter(), 0.0, None, False
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    count.errors[f"chat: {(await response.aread())[:200]!r}"] += 1
                    continue
                async for line in response.aiter_lines():
                    first_s = first_s or time.perf_counter()
                    is_done = is_done or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        usage = json.loads(line[len("data: ") :]).get("usage") or usage
        except httpx.HTTPError as error:
            count.errors[f"chat: {type(error).__name__}"] += 1
            continue
        if not is_done or usage is None:
            count.errors["chat: the stream broke off"] += 1
            continue
        count.answers += 1
        count.answer_tokens += usage["completion_tokens"]
        count.longest_wait_s = max(count.longest_wait_s, first_s - sent_s)


async def embed(
    client: httpx.AsyncClient, model: str, deadline_s: float, count: Count, seed: int, known: dict[str, np.ndarray]
) -> None:
    """One client: batches of texts until the deadline; `known` are the vectors seen so far, by text."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(_WORDS, k=rng.randint(5, 200))) for _ in range(64)]
    while time.perf_counter() < deadline_s:
        batch = rng.sample(texts, 16)
        try:
            response = await client.post("/v1/embeddings", json={"model": model, "input": batch})
        except httpx.HTTPError as error:
            count.errors[f"embeddings: {type(error).__name__}"] += 1
            continue
        if response.status_code != 200:
            count.errors[f"embeddings: {response.text[:200]}"] += 1
            continue
        answer = response.json()
        vectors = np.array([entry["embedding"] for entry in answer["data"]])
        if len(vectors) != len(batch):
            count.errors["embeddings: a vector is missing"] += 1
            continue
        for text, vector in zip(batch, vectors, strict=True):
            earlier = known.setdefault(text, vector)
            cosine = float(vector @ earlier / np.linalg.norm(vector) / np.linalg.norm(earlier))
            count.largest_drift = max(count.largest_drift, 1.0 - cosine)
        count.batches += 1
        count.texts += len(batch)
        count.text_tokens += answer["usage"]["prompt_tokens"]


async def measure(arguments: argparse.Namespace) -> Count:
    count, known = Count(), dict[str, np.ndarray]()
    async with httpx.AsyncClient(base_url=arguments.base_url, timeout=300.0) as client:
        # Both are brought into memory before the clock runs.
        await ask(client, arguments.chat, time.perf_counter() + _ONCE_S, Count(), 0)
        await embed(client, arguments.embedder, time.perf_counter() + _ONCE_S, Count(), 0, {})
        deadline_s = time.perf_counter() + arguments.seconds
        streams = [ask(client, arguments.chat, deadline_s, count, seed) for seed in range(arguments.streams)]
        clients = [
            embed(client, arguments.embedder, deadline_s, count, seed, known) for seed in range(arguments.clients)
        ]
        await asyncio.gather(*streams, *clients)
    if count.largest_drift > _LARGEST_DRIFT:
        count.errors[f"embeddings: a vector changed by {count.largest_drift:.2g}"] += 1
    return count


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Chat streams and embedding clients at once.")
    parser.add_argument("--base-url", default="http://127.0.0.1:11435")
    parser.add_argument("--chat", default="starter")
    parser.add_argument("--embedder", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--clients", type=int, default=8)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    count = asyncio.run(measure(arguments))
    rows: dict[str, Any] = {
        "answers": count.answers,
        "answer_tokens_per_s": round(count.answer_tokens / arguments.seconds, 1),
        "longest_wait_s": round(count.longest_wait_s, 2),
        "texts_per_s": round(count.texts / arguments.seconds, 1),
        "text_tokens_per_s": round(count.text_tokens / arguments.seconds, 1),
        "largest_drift": count.largest_drift,
        "errors": sum(count.errors.values()),
    }
    for name, value in rows.items():
        print(f"{name:24}{value:>16,}")
    for reason, number in count.errors.most_common():
        print(f"{number} x {reason}", file=sys.stderr)
    print(json.dumps({"benchmark": "together", "chat": arguments.chat, "embedder": arguments.embedder, **rows}))
    sys.exit(1 if count.errors else 0)


if __name__ == "__main__":
    main()
