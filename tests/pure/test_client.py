from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from app.client import ChatEvent, ChatFinished, ClientError, QuireClient, TextDelta
from app.schema.admin import ProgressLine
from app.schema.residency import ResidencyEvent, RunningModels
from tests.fakes.http_daemon import running_model

Handler = Callable[[httpx.Request], httpx.Response]


class Body(httpx.AsyncByteStream):
    """A response body in chunks, which may break off with an error."""

    def __init__(self, *chunks: bytes | Exception) -> None:
        self.chunks = chunks
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def aclose(self) -> None:
        self.is_closed = True


def client_of(handler: Handler, **arguments: Any) -> QuireClient:
    return QuireClient("http://127.0.0.1:11435/", transport=httpx.MockTransport(handler), **arguments)


def answering(status: int, **content: Any) -> QuireClient:
    return client_of(lambda _: httpx.Response(status, **content))


def chunk(text: str | None = None, **fields: Any) -> bytes:
    body = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": fields.pop("finish_reason", None)}]}
    return b"data: " + json.dumps({**body, **fields}).encode() + b"\n\n"


USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


async def collect(client: QuireClient, **params: Any) -> list[ChatEvent]:
    return [event async for event in client.chat([{"role": "user", "content": "hi"}], "m", **params)]


async def collect_into(items: list[Any], generator: AsyncIterator[Any]) -> None:
    """Keeps what came before a failure."""
    async for item in generator:
        items.append(item)


async def test_a_chat_is_deltas_and_then_its_end() -> None:
    requests: list[httpx.Request] = []
    ticks = iter([10.0, 10.5, 12.5])

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
        body = Body(role, b": ping\n\n", chunk("Hel"), chunk("lo")[:9], chunk("lo")[9:], chunk(finish_reason="stop"))
        return httpx.Response(200, stream=Body(*body.chunks, USAGE, DONE))

    async with client_of(handler, api_key="secret", clock=lambda: next(ticks)) as client:
        events = await collect(client, temperature=0.0, seed=3)
    finished = ChatFinished(
        finish_reason="stop",
        prompt_tokens=7,
        completion_tokens=5,
        cached_tokens=4,
        time_to_first_token_s=0.5,
        duration_s=2.5,
    )
    assert events == [TextDelta("Hel"), TextDelta("lo"), finished]
    assert finished.tokens_per_s == pytest.approx(2.0)
    assert finished.summary() == "5 tokens · 2.0 tok/s · first token 0.50 s · 4 of 7 cached"
    assert requests[0].url == "http://127.0.0.1:11435/v1/chat/completions"
    assert requests[0].headers["authorization"] == "Bearer secret"
    assert json.loads(requests[0].content) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.0,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_characters_that_other_splitters_break_at_stay_in_the_text() -> None:
    raw = 'data: {"choices":[{"delta":{"content":"a\u2028b\x85c"}}]}\n\n'.encode()
    async with answering(200, stream=Body(raw, DONE)) as client:
        assert (await collect(client))[0] == TextDelta("a\u2028b\x85c")


@pytest.mark.parametrize(
    ("chunks", "code"),
    [
        ((b'data: {"error":{"message":"It died.","code":"worker_died","type":"server_error"}}\n\n',), "worker_died"),
        ((), "stream_ended"),
        ((httpx.RemoteProtocolError("cut"),), "connection_lost"),
        ((httpx.ReadError("reset"),), "connection_lost"),
        ((b"data: {broken\n\n",), "invalid_answer"),
    ],
)
async def test_a_failure_in_the_middle_comes_after_the_text_before_it(
    chunks: tuple[bytes | Exception, ...], code: str
) -> None:
    events: list[ChatEvent] = []
    async with answering(200, stream=Body(chunk("Half"), *chunks)) as client:
        with pytest.raises(ClientError) as caught:
            await collect_into(events, client.chat([], "m"))
    assert events == [TextDelta("Half")]
    assert caught.value.code == code


async def test_leaving_early_closes_the_connection() -> None:
    body = Body(chunk("one"), chunk("two"), DONE)
    async with answering(200, stream=body) as client, aclosing(client.chat([], "m")) as events:
        assert await anext(events) == TextDelta("one")
        assert not body.is_closed
        await events.aclose()
        assert body.is_closed


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b'{"error":{"message":"No model x.","code":"model_not_found","type":"t"}}', "model_not_found", "No model x."),
        (b'{"error":{"message":"Bad.","type":"invalid_request_error","code":null}}', "invalid_request_error", "Bad."),
        (b'{"error":"plain words"}', "error", "plain words"),
        (b"<html>", "http_error", "The daemon answered POST /v1/chat/completions with status 404; see its log."),
        (b"", "http_error", "The daemon answered POST /v1/chat/completions with status 404; see its log."),
    ],
)
async def test_an_error_answer_of_any_shape(content: bytes, code: str, message: str) -> None:
    async with answering(404, content=content) as client:
        with pytest.raises(ClientError) as caught:
            await collect(client)
    assert (caught.value.status, caught.value.code, caught.value.message) == (404, code, message)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (httpx.ConnectError("refused"), "daemon_unreachable"),
        (httpx.ConnectTimeout("slow"), "daemon_unreachable"),
        (httpx.ReadTimeout("slow"), "daemon_timeout"),
        (httpx.RemoteProtocolError("what"), "connection_lost"),
    ],
)
async def test_a_daemon_that_cannot_be_reached(error: httpx.TransportError, code: str) -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        raise error

    async with client_of(handler) as client:
        with pytest.raises(ClientError) as caught:
            await client.residency.ps()
        assert caught.value.code == code
        assert "http://127.0.0.1:11435" in caught.value.message
        with pytest.raises(ClientError):
            await collect(client)


async def test_progress_ends_with_success() -> None:
    lines = (
        b'{"status":"looking"}\n\n{"status":"downloading","file":"f","total":10,"completed":4}\n{"status":"success"}\n'
    )
    async with answering(200, content=lines) as client:
        assert [line async for line in client.pull("m")] == [
            ProgressLine("looking"),
            ProgressLine("downloading", "f", 10, 4),
        ]


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (b'{"error":{"message":"The disk is full.","code":"not_enough_space"}}\n', "not_enough_space"),
        (b"", "stream_ended"),
    ],
)
async def test_progress_that_does_not_end_well(last: bytes, code: str) -> None:
    seen: list[ProgressLine] = []
    async with answering(200, content=b'{"status":"downloading"}\n' + last) as client:
        with pytest.raises(ClientError) as caught:
            await collect_into(seen, client.load("m"))
    assert seen == [ProgressLine("downloading")]
    assert caught.value.code == code


async def test_the_other_routes() -> None:
    answers = {
        ("GET", "/health"): {"status": "ok", "models": []},
        ("GET", "/version"): {"version": "1.2.3"},
        ("GET", "/api/tags"): {"models": []},
        ("GET", "/api/ps"): {"models": []},
        ("DELETE", "/api/delete"): {"freed_bytes": 12},
        ("POST", "/api/stop"): {"stopped": True, "a_field_of_a_newer_daemon": 1},
        ("POST", "/api/shutdown"): {"status": "stopping"},
    }
    bodies: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content) if request.content else None)
        return httpx.Response(200, json=answers[(request.method, request.url.path)])

    async with client_of(handler) as client:
        assert await client.health()
        assert await client.version() == "1.2.3"
        assert await client.tags() == ()
        assert await client.residency.ps() == RunningModels(())
        assert await client.delete("m") == 12
        assert await client.residency.stop("m")
        await client.shutdown()
    assert bodies == [None, None, None, None, {"model": "m"}, {"model": "m"}, None]


async def test_an_answer_of_another_program_is_recognised() -> None:
    async with answering(200, json={"hello": "world"}) as client:
        with pytest.raises(ClientError) as caught:
            await client.version()
    assert caught.value.code == "invalid_answer"


@pytest.mark.parametrize(
    ("url", "uses_proxy"),
    [
        ("http://127.0.0.1:1", False),
        ("http://[::1]:1", False),
        ("http://localhost:1", False),
        ("http://192.0.2.7:1", True),
    ],
)
async def test_proxies_of_the_environment_never_apply_to_loopback(
    url: str, uses_proxy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:2")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with QuireClient(url) as client:
        assert client._http.trust_env is uses_proxy


def test_speed_needs_two_tokens() -> None:
    def finished(completion_tokens: int, first_s: float | None) -> ChatFinished:
        return ChatFinished(
            finish_reason="length",
            prompt_tokens=1,
            completion_tokens=completion_tokens,
            cached_tokens=0,
            time_to_first_token_s=first_s,
            duration_s=1.0,
        )

    assert finished(1, 0.5).tokens_per_s is None
    assert finished(1, 0.5).summary() == "1 token · first token 0.50 s · cut off at the token limit"
    assert finished(0, None).summary() == "0 tokens · cut off at the token limit"
    assert finished(5, 1.0).tokens_per_s is None


async def test_events_are_read_line_by_line_until_the_daemon_ends_them() -> None:
    event = {"number": 1, "at": "2026-01-01T00:00:00Z", "kind": "load", "model": "m", "why": "Somebody asked for it."}
    lines = b"\n" + json.dumps(event).encode() + b"\n\n"

    async with answering(200, content=lines) as client:
        assert [one async for one in client.residency.follow_events()] == [ResidencyEvent(**event)]


async def test_an_error_among_followed_events_is_raised() -> None:
    lines = b'\n{"error":{"message":"Something went wrong inside the daemon.","code":"internal_error"}}\n'

    async with answering(200, content=lines) as client:
        with pytest.raises(ClientError, match="Something went wrong"):
            await anext(client.residency.follow_events())


async def test_whoever_changes_a_model_waits_as_long_as_it_takes() -> None:
    asked: list[tuple[str, Any, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, json.loads(request.content), request.extensions["timeout"]["read"]))
        return httpx.Response(200, json=running_model())

    async with client_of(handler) as client:
        await client.residency.share("m", 0.4)
        await client.residency.pin("m", is_pinned=False)
        await client.residency.sleep("m")
        assert (await client.residency.wake("m")).name == "m"
    assert asked == [
        ("/api/share", {"model": "m", "share": 0.4}, None),
        ("/api/pin", {"model": "m", "pin": False}, None),
        ("/api/sleep", {"model": "m"}, None),
        ("/api/wake", {"model": "m"}, None),
    ]
