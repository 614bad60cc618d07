"""`EventStream`: a response that sends what an async generator yields, and notices when nobody listens.

Litestar's own `Stream` cancels the generator in a way that forbids awaiting in its `finally`,
and sends nothing while the first byte takes long.  Here the status line waits for the first
chunk, so that an early error still gets its own status; after `keep_alive_interval_s` without
output a keep-alive frame goes out instead; a client that leaves cancels the generator at once.
Used by all streaming routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from litestar import Response
from litestar.types import ASGIApp, Receive, Scope, Send

from app.api.disconnect import wait_for_disconnect
from app.errors import describe
from app.schema.error import ErrorBody

encode_json = msgspec.json.Encoder().encode

SSE_DONE = b"data: [DONE]\n\n"
SSE_KEEP_ALIVE = b": ping\n\n"


def sse_event(value: Any) -> bytes:
    """One Server-Sent Event as OpenAI clients expect it: a single data line, LF only."""
    return b"data: " + encode_json(value) + b"\n\n"


def sse_error(body: ErrorBody) -> bytes:
    """What ends a stream that had already begun: one error event, then the end mark."""
    return sse_event(body) + SSE_DONE


def json_line(value: Any) -> bytes:
    return encode_json(value) + b"\n"


class EventStream(Response[None]):
    """Send `chunks`; `encode_error` gives the last chunk of a stream that fails after it began."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        media_type: str,
        encode_error: Callable[[ErrorBody], bytes],
        keep_alive: bytes | None = None,
        keep_alive_interval_s: float = 10.0,
    ) -> None:
        super().__init__(None, media_type=media_type, status_code=200)
        self._delivery = _Delivery(chunks, media_type, encode_error, keep_alive, keep_alive_interval_s)

    def to_asgi_response(self, *_args: Any, **_kwargs: Any) -> ASGIApp:  # type: ignore[override]
        return self._delivery


class _Delivery:
    """The ASGI application of one `EventStream`."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        media_type: str,
        encode_error: Callable[[ErrorBody], bytes],
        keep_alive: bytes | None,
        keep_alive_interval_s: float,
    ) -> None:
        self._chunks = chunks
        self._media_type = media_type
        self._encode_error = encode_error
        self._keep_alive = keep_alive
        self._interval_s = keep_alive_interval_s
        self._is_started = False
        self._has_sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send, str(scope["path"])))
        leaving = asyncio.create_task(wait_for_disconnect(receive))
        pinging = asyncio.create_task(self._ping(send))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (writing, leaving, pinging):
                task.cancel()
            await asyncio.gather(writing, leaving, pinging, return_exceptions=True)

    async def _write(self, send: Send, path: str) -> None:
        """Send all chunks and the end; an error before the first byte is left to the exception handlers."""
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    # One engine step wakes all streams: they make their chunks first and write them in one go,
                    # which costs a third less than taking turns, since a write wakes the reader's process.
                    await asyncio.sleep(0)
                    await self._send(send, chunk)
        except Exception as error:
            if not self._is_started:
                raise
            await self._send(send, self._encode_error(describe(error, path)[1]))
        await self._send(send, b"", more=False)

    async def _ping(self, send: Send) -> None:
        while self._keep_alive is not None:
            self._has_sent = False
            await asyncio.sleep(self._interval_s)
            if not self._has_sent:
                await self._send(send, self._keep_alive)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        if not self._is_started:
            self._is_started = True
            headers = [
                (b"content-type", self._media_type.encode()),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._has_sent = True
        await send({"type": "http.response.body", "body": body, "more_body": more})
