"""A load generator that outruns the server: streamed completions over raw sockets, in several processes.

A client that parses every event in one Python process stops at some ten thousand tokens a second
and would measure itself.  Here a connection only notes when bytes arrive; the number of tokens
comes from the usage in the last event.  Knows /v1/completions with token ids and nothing of the
engine.  Used by `benchmarks/serve.py`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast
from urllib.parse import urlsplit

import uvloop

_TAIL_BYTES = 2048
"""Holds the last chunk of text, the usage and the end mark, whatever was written together."""
_START_DELAY_S = 0.1
_REASON_DELAY_S = 0.1
_FIRST_EVENT = re.compile(rb"data: \{")
_USAGE = re.compile(rb'"prompt_tokens":(\d+),"completion_tokens":(\d+)')


@dataclass(frozen=True, slots=True)
class Target:
    """Where and what to ask; prompts are random ids from 10 to `max_id`."""

    base_url: str
    model: str
    input_len: int
    output_len: int
    max_id: int = 10_000
    api_key: str | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, on the system-wide monotonic clock in seconds; `due_s` is when it should have been sent."""

    due_s: float
    first_token_s: float
    last_token_s: float
    num_prompt_tokens: int
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.due_s

    @property
    def per_token_s(self) -> float:
        """Time per output token after the first."""
        return (self.last_token_s - self.first_token_s) / max(1, self.num_tokens - 1)


class RequestFailed(Exception):
    """The server answered something other than a complete stream."""


def closed_loop(target: Target, num_streams: int, rounds: int, num_processes: int, seed: int) -> list[Timing]:
    """`num_streams` streams at all times: each sends its next request when its last one has ended."""
    shares = [
        [(stream, (0.0,) * rounds) for stream in range(process, num_streams, num_processes)]
        for process in range(num_processes)
    ]
    return _run(target, [share for share in shares if share], seed)


def open_loop(target: Target, rate: float, num_requests: int, num_processes: int, seed: int) -> list[Timing]:
    """Requests arrive at random (a Poisson process of `rate` a second), however the server is doing."""
    rng = random.Random(seed)
    arrivals, now = [], 0.0
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        arrivals.append(now)
    shares = [
        [(index, (arrivals[index],)) for index in range(process, num_requests, num_processes)]
        for process in range(num_processes)
    ]
    return _run(target, [share for share in shares if share], seed)


Stream = tuple[int, tuple[float, ...]]
"""A stream's number and its requests' due times after the start; earlier than "now" means at once."""


def _run(target: Target, shares: Sequence[Sequence[Stream]], seed: int) -> list[Timing]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for share in shares:
        ours, theirs = context.Pipe()
        process = context.Process(target=_client_process, args=(target, share, seed, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            pipe.recv()
        start_s = time.perf_counter() + _START_DELAY_S
        for pipe in pipes:
            pipe.send(start_s)
        timings: list[Timing] = []
        for pipe in pipes:
            result = pipe.recv()
            if isinstance(result, str):
                raise RequestFailed(result)
            timings.extend(result)
        return timings
    finally:
        for process in processes:
            process.join(1.0)
            process.kill()


def _client_process(target: Target, streams: Sequence[Stream], seed: int, pipe: Connection) -> None:
    """Body of one process: prepare, report readiness, wait for the common start, run, report."""
    try:
        pipe.send(uvloop.run(_run_streams(target, streams, seed, pipe)))
    except (RequestFailed, OSError, TimeoutError) as error:
        pipe.send(f"{type(error).__name__}: {error}")


async def _run_streams(target: Target, streams: Sequence[Stream], seed: int, pipe: Connection) -> list[Timing]:
    requests = [[_request_bytes(target, f"{seed}/{number}/{i}") for i in range(len(due))] for number, due in streams]
    # With arrivals of their own, connections are opened as they are needed, as clients would.
    connections = [await _connect(target) if len(due) > 1 or due[0] == 0.0 else None for _, due in streams]
    pipe.send("ready")
    start_s = await asyncio.to_thread(pipe.recv)
    async with asyncio.timeout(target.timeout_s):
        results = await asyncio.gather(
            *(
                _run_stream(target, connection, bodies, [start_s + at_s for at_s in due])
                for connection, bodies, (_, due) in zip(connections, requests, streams, strict=True)
            )
        )
    return [timing for result in results for timing in result]


async def _run_stream(
    target: Target, connection: StreamConnection | None, requests: Sequence[bytes], due_s: Sequence[float]
) -> list[Timing]:
    timings: list[Timing] = []
    for request, at_s in zip(requests, due_s, strict=True):
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        # In a closed loop the next request is due when the last one has ended.
        due = max(at_s, timings[-1].last_token_s) if timings else at_s
        connection = connection or await _connect(target)
        timings.append(await connection.ask(request, due))
    if connection is not None:
        connection.close()
    return timings


async def _connect(target: Target) -> StreamConnection:
    address = urlsplit(target.base_url)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(StreamConnection, address.hostname or "127.0.0.1", address.port or 80)
    return connection


class StreamConnection(asyncio.Protocol):
    """One keep-alive connection that carries one streamed completion at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._head = b""
        self._tail = b""
        self._first_s = 0.0
        self._last_s = 0.0

    async def ask(self, request: bytes, due_s: float) -> Timing:
        """Send a request and wait for the end of its stream; raises `RequestFailed`."""
        assert self._transport is not None, "connected"
        self._head, self._tail, self._first_s = b"", b"", 0.0
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended
        usage = _USAGE.search(self._tail)
        if usage is None:
            raise RequestFailed(self._tail.decode(errors="replace"))
        return Timing(due_s, self._first_s, self._last_s, int(usage[1]), int(usage[2]))

    def close(self) -> None:
        assert self._transport is not None, "connected"
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no class of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection was closed ({error}) after: {self._tail.decode(errors='replace')}")

    def data_received(self, data: bytes) -> None:
        self._last_s = time.perf_counter()
        if not self._first_s:
            self._head += data
            if b"\r\n\r\n" in self._head and not self._head.startswith(b"HTTP/1.1 200"):
                # The reason may come in a packet of its own.
                asyncio.get_running_loop().call_later(_REASON_DELAY_S, self._refuse)
            if _FIRST_EVENT.search(self._head):
                self._first_s = self._last_s
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        is_over = self._tail.endswith(b"0\r\n\r\n") and b"data: [DONE]" in self._tail
        if is_over and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _refuse(self) -> None:
        self._fail(self._head.decode(errors="replace"))

    def _fail(self, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(RequestFailed(reason))


def _request_bytes(target: Target, seed: str) -> bytes:
    rng = random.Random(seed)
    body = json.dumps(
        {
            "model": target.model,
            "prompt": [rng.randint(10, target.max_id) for _ in range(target.input_len)],
            "max_tokens": target.output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {urlsplit(target.base_url).netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if target.api_key:
        head.append(f"Authorization: Bearer {target.api_key}")
    return "\r\n".join([*head, "", ""]).encode() + body
