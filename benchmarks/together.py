"""Do a chat model and an embedding model go together?  Streams and embedding clients at once, for a minute.

    python benchmarks/together.py --chat starter --embedder NAME [--seconds 60] [--streams 8] [--clients 8]

Asks the running daemon: the streams alone, the clients alone, for `--alone` seconds each, then both.  Each stream asks
its next question when the last answer has ended; each client sends batches of texts of mixed length one after the
other.  Any answer that is not complete counts as an error, and a vector must be the same, up to rounding, each time
its text is sent.  The last line is JSON; the exit code is 1 after an error.
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
    first_token_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    batch_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """From the first request to the end of the last answer."""

    def figures(self) -> dict[str, float]:
        """Throughput, and the median and 95th percentile of how long answers took."""
        return {
            "answer_tokens_per_s": round(self.answer_tokens / self.seconds, 1),
            "first_token_ms": _percentile(self.first_token_s, 50),
            "first_token_p95_ms": _percentile(self.first_token_s, 95),
            "token_ms": _percentile(self.token_s, 50),
            "token_p95_ms": _percentile(self.token_s, 95),
            "texts_per_s": round(self.texts / self.seconds, 1),
            "text_tokens_per_s": round(self.text_tokens / self.seconds, 1),
            "batch_ms": _percentile(self.batch_s, 50),
            "batch_p95_ms": _percentile(self.batch_s, 95),
        }


def _percentile(times_s: list[float], percent: float) -> float:
    """In milliseconds; 0 of none."""
    return round(float(np.percentile(times_s, percent)) * 1e3, 1) if times_s else 0.0


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
        sent_s, first_s, last_s, usage, is_done = time.perf_counter(), 0.0, 0.0, None, False
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    count.errors[f"chat: {(await response.aread())[:200]!r}"] += 1
                    continue
                async for line in response.aiter_lines():
                    is_done = is_done or line == "data: [DONE]"
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[len("data: ") :])
                    usage = chunk.get("usage") or usage
                    if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                        last_s = time.perf_counter()
                        first_s = first_s or last_s
        except httpx.HTTPError as error:
            count.errors[f"chat: {type(error).__name__}"] += 1
            continue
        if not is_done or usage is None:
            count.errors["chat: the stream broke off"] += 1
            continue
        count.answers += 1
        count.answer_tokens += usage["completion_tokens"]
        count.first_token_s.append(first_s - sent_s)
        if usage["completion_tokens"] > 1:
            count.token_s.append((last_s - first_s) / (usage["completion_tokens"] - 1))


async def embed(
    client: httpx.AsyncClient, model: str, deadline_s: float, count: Count, seed: int, known: dict[str, np.ndarray]
) -> None:
    """One client: batches of texts until the deadline; `known` are the vectors seen so far, by text."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(_WORDS, k=rng.randint(5, 200))) for _ in range(64)]
    while time.perf_counter() < deadline_s:
        batch, sent_s = rng.sample(texts, 16), time.perf_counter()
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
        count.batch_s.append(time.perf_counter() - sent_s)
        count.texts += len(batch)
        count.text_tokens += answer["usage"]["prompt_tokens"]


async def phase(
    client: httpx.AsyncClient, arguments: argparse.Namespace, seconds: float, *, streams: int, clients: int
) -> Count:
    """So many streams and embedding clients at once."""
    count, known = Count(), dict[str, np.ndarray]()
    started_s = time.perf_counter()
    deadline_s = started_s + seconds
    await asyncio.gather(
        *(ask(client, arguments.chat, deadline_s, count, seed) for seed in range(streams)),
        *(embed(client, arguments.embedder, deadline_s, count, seed, known) for seed in range(clients)),
    )
    count.seconds = time.perf_counter() - started_s
    if count.largest_drift > _LARGEST_DRIFT:
        count.errors[f"embeddings: a vector changed by {count.largest_drift:.2g}"] += 1
    return count


async def measure(arguments: argparse.Namespace) -> tuple[Count, Count, Count]:
    """The streams alone, the clients alone, and both."""
    streams, clients = arguments.streams, arguments.clients
    async with httpx.AsyncClient(base_url=arguments.base_url, timeout=300.0) as client:
        # Both are brought into memory before the clock runs.
        await phase(client, arguments, _ONCE_S, streams=1, clients=1)
        return (
            await phase(client, arguments, arguments.alone, streams=streams, clients=0),
            await phase(client, arguments, arguments.alone, streams=0, clients=clients),
            await phase(client, arguments, arguments.seconds, streams=streams, clients=clients),
        )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Chat streams and embedding clients at once.")
    parser.add_argument("--base-url", default="http://127.0.0.1:11435")
    parser.add_argument("--chat", default="starter")
    parser.add_argument("--embedder", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--alone", type=float, default=10.0, help="seconds of each alone")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--clients", type=int, default=8)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    chat, embedder, both = asyncio.run(measure(arguments))
    together = both.figures()
    # Each row belongs to one of the two: the other had nothing to do with it.
    alone = {name: value or chat.figures()[name] for name, value in embedder.figures().items()}
    print(f"{'':24}{'alone':>12}{'together':>12}")
    for name, value in together.items():
        print(f"{name:24}{alone[name]:>12,}{value:>12,}")
    errors = chat.errors + embedder.errors + both.errors
    for reason, number in errors.most_common():
        print(f"{number} x {reason}", file=sys.stderr)
    summary = {
        "benchmark": "together",
        "chat": arguments.chat,
        "embedder": arguments.embedder,
        "alone": alone,
        "together": together,
        "answers": both.answers,
        "largest_drift": both.largest_drift,
        "errors": sum(errors.values()),
    }
    print(json.dumps(summary))
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
