"""`QuireClient`: the daemon's HTTP API as typed async methods.

Used by `app.cli` and `tui`, which know no HTTP.  Every failure becomes one `ClientError` whose
message is a sentence for people: an OpenAI-shaped error body, an error event in the middle of
a stream, a refused connection, a connection lost half-way.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from app.chats_client import ChatsClient, turns_path
from app.event_stream import iter_json_lines, iter_lines, iter_sse_data
from app.jobs_client import JobsClient, pull_body
from app.residency_client import ResidencyClient
from app.schema.admin import (
    DeletedModel,
    Health,
    InstalledModelEntry,
    InstalledModels,
    ModelCardDetails,
    ProgressLine,
    ShutdownAnswer,
    Version,
)
from app.schema.chats import ModelUsageEntry, UsageReport
from app.settings import is_loopback

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0

T = TypeVar("T")


class ClientError(Exception):
    """The daemon said no, or could not be reached; `code` is stable, `message` is one sentence.

    `status` is the HTTP status, or 503 when no answer came.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class TextDelta(msgspec.Struct, frozen=True):
    """New text of a streamed answer."""

    text: str


class ChatFinished(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a streamed answer; times are measured at the client, in seconds.

    `time_to_first_token_s` is None when no text came.
    """

    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    time_to_first_token_s: float | None
    duration_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first one, over the time they took; None for fewer than two tokens."""
        if self.time_to_first_token_s is None or self.completion_tokens < 2:
            return None
        decode_s = self.duration_s - self.time_to_first_token_s
        return (self.completion_tokens - 1) / decode_s if decode_s > 0 else None

    def summary(self) -> str:
        """`42 tokens · 38.2 tok/s · first token 0.21 s`, and what is worth knowing beside."""
        parts = [f"{self.completion_tokens:,} token{'s' if self.completion_tokens != 1 else ''}"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        if self.time_to_first_token_s is not None:
            parts.append(f"first token {self.time_to_first_token_s:.2f} s")
        if self.cached_tokens:
            parts.append(f"{self.cached_tokens:,} of {self.prompt_tokens:,} cached")
        if self.finish_reason == "length":
            parts.append("cut off at the token limit")
        return " · ".join(parts)


ChatEvent = TextDelta | ChatFinished


class EmbeddedText(msgspec.Struct, frozen=True):
    """A text as a vector, and how many tokens it had."""

    vector: tuple[float, ...]
    num_tokens: int


class _ErrorBody(msgspec.Struct):
    message: str = ""
    code: str | None = None
    type: str | None = None
    status: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _PromptTokenDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptTokenDetails | None = None


class _Chunk(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: _ErrorBody | str | None = None


class _Embedding(msgspec.Struct):
    embedding: tuple[float, ...]


class _Embeddings(msgspec.Struct):
    data: tuple[_Embedding, ...]
    usage: _Usage


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody | str


class _Failure(msgspec.Struct):
    error: _ErrorBody | str | None = None


class _ProgressOrError(msgspec.Struct):
    status: str = ""
    file: str | None = None
    total: int = 0
    completed: int = 0
    all_total: int = 0
    all_completed: int = 0
    error: _ErrorBody | str | None = None


class QuireClient:
    """One connection pool to one daemon; use it as an async context manager.

    `base_url` has no path, e.g. `http://127.0.0.1:11435`.  Proxy settings of the environment
    apply to other machines only, never to loopback.  With `is_offline` a pull touches no network.
    `transport` and `clock` are for tests.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        is_offline: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.chats = ChatsClient(self)
        self.jobs = JobsClient(self, is_offline=is_offline)
        self.residency = ResidencyClient(self)
        self._clock = clock
        self._is_offline = is_offline
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=not is_loopback(urlsplit(self.base_url).hostname or ""),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._http.aclose()

    async def chat(
        self, messages: Sequence[dict[str, Any]], model: str, *, chat_id: str | None = None, **params: Any
    ) -> AsyncGenerator[ChatEvent, None]:
        """Stream one answer: any number of `TextDelta`, then one `ChatFinished`.

        With `chat_id` the daemon saves both sides while they come.  `params` go into the request body as
        they are (temperature, max_tokens, seed, ...).  Raises `ClientError` after the deltas that came before
        the failure.  Closing the generator early closes the connection, which aborts the request in the
        daemon.
        """
        body = {
            **params,
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        path = "/v1/chat/completions" if chat_id is None else turns_path(chat_id)
        start_s = self._clock()
        first_s: float | None = None
        finish_reason: str | None = None
        usage = _Usage()
        async with (
            self._stream("POST", path, body) as lines,
            aclosing(_chat_chunks(lines)) as chunks,
        ):
            async for chunk in chunks:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    finish_reason = choice.finish_reason or finish_reason
                    if choice.delta.content:
                        first_s = self._clock() if first_s is None else first_s
                        yield TextDelta(choice.delta.content)
        yield ChatFinished(
            finish_reason=finish_reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0,
            time_to_first_token_s=None if first_s is None else first_s - start_s,
            duration_s=self._clock() - start_s,
        )

    async def embed(self, text: str, model: str) -> EmbeddedText:
        """The vector of one text."""
        answer = await self.request("POST", "/v1/embeddings", _Embeddings, {"model": model, "input": text})
        return EmbeddedText(answer.data[0].embedding, answer.usage.prompt_tokens)

    async def health(self) -> bool:
        """Whether the daemon answers and is ready for requests."""
        return (await self.request("GET", "/health", Health)).status == "ok"

    async def version(self) -> str:
        """The version of the daemon."""
        return (await self.request("GET", "/version", Version)).version

    async def tags(self) -> tuple[InstalledModelEntry, ...]:
        """The installed models."""
        return (await self.request("GET", "/api/tags", InstalledModels)).models

    async def show(self, model: str) -> ModelCardDetails:
        """The facts of one installed model."""
        return await self.request("POST", "/api/show", ModelCardDetails, {"model": model})

    async def delete(self, model: str) -> int:
        """Remove an installed model; returns the bytes freed."""
        return (await self.request("DELETE", "/api/delete", DeletedModel, {"model": model})).freed_bytes

    async def shutdown(self) -> None:
        """Ask the daemon to end; it answers before it does."""
        await self.request("POST", "/api/shutdown", ShutdownAnswer)

    def pull(
        self, model: str, *, limit_bytes_per_s: int | None = None, force: bool = False
    ) -> AsyncGenerator[ProgressLine, None]:
        """Download a model, yielding progress; closing the generator early pauses the download.

        It goes on if another client waits for it too, or if it was started by `jobs.start`.
        """
        body = pull_body(model, limit_bytes_per_s=limit_bytes_per_s, offline=self._is_offline, force=force)
        return self.progress("POST", "/api/pull", model, body)

    def load(self, model: str) -> AsyncGenerator[ProgressLine, None]:
        """Bring a model into memory as the settings want it there, yielding progress until it is ready."""
        return self.residency.load(model)

    async def progress(
        self, method: str, path: str, model: str, body: dict[str, Any] | None = None
    ) -> AsyncGenerator[ProgressLine, None]:
        """The lines of a long operation until it succeeded; for `pull` and the clients of parts."""
        async with self._stream(method, path, body) as lines:
            async for line in iter_json_lines(lines):
                event = _decode(line, _ProgressOrError)
                if event.error is not None:
                    raise _error(event.error, status=500)
                if event.status == "success":
                    return
                yield ProgressLine(
                    event.status, event.file, event.total, event.completed, event.all_total, event.all_completed
                )
        raise ClientError(503, "stream_ended", f"The daemon stopped before {model} was ready; try again.")

    async def usage(self) -> tuple[ModelUsageEntry, ...]:
        """How long the prompts and answers of each model have been."""
        return (await self.request("GET", "/api/usage", UsageReport)).models

    async def json_lines(self, path: str, shape: type[T]) -> AsyncGenerator[T, None]:
        """The values of an answer that goes on until the daemon ends it or the generator is closed."""
        async with self._stream("GET", path, None) as lines:
            async for line in iter_json_lines(lines):
                failure = _decode(line, _Failure).error
                if failure is not None:
                    raise _error(failure, status=500)
                yield _decode(line, shape)

    async def request(
        self, method: str, path: str, shape: type[T], body: dict[str, Any] | None = None, *, is_patient: bool = False
    ) -> T:
        """One request of which the answer is JSON of this shape, however long it takes if `is_patient`."""
        return _decode((await self._answer(method, path, body, is_patient=is_patient)).content, shape)

    async def request_text(self, path: str) -> str:
        """One request of which the answer is a text."""
        return (await self._answer("GET", path, None)).text

    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, *, is_patient: bool = False
    ) -> httpx.Response:
        timeout = httpx.Timeout(None if is_patient else ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        with self._connection_errors():
            response = await self._http.request(method, path, json=body, timeout=timeout)
        if response.status_code >= 400:
            raise _error_answer(response.status_code, response.content, f"{method} {path}")
        return response

    @asynccontextmanager
    async def _stream(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a streamed answer and give its lines; generation may be silent for long, so reads never time out."""
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        with self._connection_errors():
            async with self._http.stream(method, path, json=body, timeout=timeout) as response:
                if response.status_code >= 400:
                    raise _error_answer(response.status_code, await response.aread(), f"{method} {path}")
                yield iter_lines(response.aiter_bytes())

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ClientError(
                503,
                "daemon_unreachable",
                f"No daemon answers at {self.base_url}; start one with `quire serve`.",
            ) from error
        except httpx.TimeoutException as error:
            raise ClientError(
                504, "daemon_timeout", f"The daemon at {self.base_url} did not answer in time; see its log."
            ) from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ClientError(
                503, "connection_lost", f"The connection to the daemon at {self.base_url} was lost; try again."
            ) from error


async def _chat_chunks(lines: AsyncIterator[bytes]) -> AsyncGenerator[_Chunk, None]:
    """The chunks of a streamed chat answer up to [DONE]; raises `ClientError` for an error event."""
    async for data in iter_sse_data(lines):
        if data == b"[DONE]":
            return
        chunk = _decode(data, _Chunk)
        if chunk.error is not None:
            raise _error(chunk.error, status=500)
        yield chunk
    raise ClientError(503, "stream_ended", "The daemon stopped in the middle of the answer; ask again.")


def _decode(data: bytes, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=shape)
    except msgspec.MsgspecError as error:
        raise ClientError(
            502, "invalid_answer", "The answer is not that of a Quire daemon; check QUIRE_HOST and QUIRE_PORT."
        ) from error


def _error_answer(status: int, body: bytes, what: str) -> ClientError:
    """The `ClientError` for an answer of status 4xx or 5xx, whatever its body is."""
    fallback = ClientError(status, "http_error", f"The daemon answered {what} with status {status}; see its log.")
    try:
        error = msgspec.json.decode(body, type=_ErrorAnswer).error
    except msgspec.MsgspecError:
        return fallback
    return _error(error, status=status)


def _error(error: _ErrorBody | str, *, status: int) -> ClientError:
    if isinstance(error, str):
        return ClientError(status, "error", error)
    return ClientError(error.status or status, error.code or error.type or "error", error.message)
