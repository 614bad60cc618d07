"""`ChunkStream`: the Server-Sent Events of one streamed OpenAI answer, as bytes, and the response around them.

All events of an answer share their envelope (id, model, ...), so it is encoded once and each event
only adds its choice.  What an event holds is said by `app.translate.openai_output`; this module
knows no field but `choices`.  Used by `app.api.openai` and `app.api.chats`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from app.api.streaming import SSE_DONE, SSE_KEEP_ALIVE, EventStream, encode_json, sse_error, sse_event
from app.schema.openai import ChatChunk, Completion
from app.settings import Settings
from app.translate.job import GenerateJob
from app.translate.openai_output import (
    AnswerHead,
    chat_chunk_choice,
    chat_envelope,
    chat_usage_chunk,
    completion_chunk_choice,
    completion_envelope,
    completion_usage_chunk,
)
from engine.api.output import OutputDelta

_NO_CHOICES = b'"choices":[]'


class ChunkStream:
    """Turns batches of deltas into events; `encode_end` gives what follows the last of them."""

    def __init__(
        self,
        head: AnswerHead,
        make_choice: Callable[..., Any],
        envelope: ChatChunk | Completion,
        make_usage_chunk: Callable[[AnswerHead, Sequence[OutputDelta]], ChatChunk | Completion] | None,
    ) -> None:
        self._head = head
        self._make_choice = make_choice
        self._make_usage_chunk = make_usage_chunk
        # Quotes within a value are escaped, so this is the key and no text of a client.
        before, after = encode_json(envelope).split(_NO_CHOICES)
        self._before = b"data: " + before + b'"choices":['
        self._after = b"]" + after + b"\n\n"
        self._begun: set[int] = set()
        self._finished: list[OutputDelta] = []

    @classmethod
    def of_chat(cls, head: AnswerHead, *, include_usage: bool) -> ChunkStream:
        envelope = chat_envelope(head, include_usage=include_usage)
        return cls(head, chat_chunk_choice, envelope, chat_usage_chunk if include_usage else None)

    @classmethod
    def of_completion(cls, head: AnswerHead, *, include_usage: bool) -> ChunkStream:
        envelope = completion_envelope(head, include_usage=include_usage)
        return cls(head, completion_chunk_choice, envelope, completion_usage_chunk if include_usage else None)

    def encode(self, deltas: Sequence[OutputDelta]) -> bytes:
        """One event per delta; a delta that carries nothing yet has none."""
        events: list[bytes] = []
        for delta in deltas:
            if delta.finish_reason is not None:
                self._finished.append(delta)
            elif not delta.text and not delta.logprobs:
                continue
            is_first = delta.index not in self._begun
            if is_first:
                self._begun.add(delta.index)
            events += self._before, encode_json(self._make_choice(self._head, delta, is_first=is_first)), self._after
        return b"".join(events)

    def encode_end(self) -> bytes:
        """The usage event where one was asked for, and the end mark."""
        if self._make_usage_chunk is None:
            return SSE_DONE
        return sse_event(self._make_usage_chunk(self._head, self._finished)) + SSE_DONE


def answer_head(job: GenerateJob) -> AnswerHead:
    """What all parts of one answer share."""
    return AnswerHead(
        id=job.prompts[0].request_id,
        created=int(time.time()),
        model=job.model,
        has_logprobs="logprobs" in job.overrides,
        num_samples=job.num_samples,
    )


def stream_answer(
    batches: AsyncGenerator[list[OutputDelta], None], chunks: ChunkStream, settings: Settings
) -> EventStream:
    """The response that sends an answer as it comes; a client that leaves closes `batches`."""
    return EventStream(
        _events(batches, chunks),
        media_type="text/event-stream",
        encode_error=sse_error,
        keep_alive=SSE_KEEP_ALIVE,
        keep_alive_interval_s=settings.keep_alive_interval_s,
    )


async def _events(batches: AsyncGenerator[list[OutputDelta], None], chunks: ChunkStream) -> AsyncGenerator[bytes, None]:
    """The events of one streamed answer, those of a batch in one piece."""
    async with aclosing(batches):
        async for deltas in batches:
            if events := chunks.encode(deltas):
                yield events
    yield chunks.encode_end()
