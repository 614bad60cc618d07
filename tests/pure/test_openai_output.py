"""Deltas to OpenAI answers and chunks."""

from __future__ import annotations

from typing import Any

import msgspec

from app.api.openai_stream import ChunkStream
from app.schema.openai import Completion, CompletionChoice
from app.translate.openai_output import AnswerHead, chat_completion, completion, total_usage
from app.version import FINGERPRINT
from engine.api.output import OutputDelta, TextLogprob, Usage

HEAD = AnswerHead(id="id", created=1, model="m", has_logprobs=False, num_samples=2)


def last(index: int, text: str = "", *, prompt: int = 3, completion_tokens: int = 2, cached: int = 0) -> OutputDelta:
    usage = Usage(prompt_tokens=prompt, completion_tokens=completion_tokens, cached_tokens=cached)
    return OutputDelta(index=index, text=text, finish_reason="stop", stop_reason="END", usage=usage)


def test_a_prompt_counts_once_for_all_its_samples() -> None:
    deltas = [last(0, prompt=3, cached=1), last(1, prompt=3, cached=3), last(2, prompt=5, cached=2), last(3, prompt=5)]

    usage = total_usage(HEAD, deltas)

    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, 8, 16)
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_deltas_of_a_choice_are_joined() -> None:
    deltas = {1: [last(1, "x")], 0: [OutputDelta(index=0, text="a"), OutputDelta(index=0), last(0, "b")]}

    answer = chat_completion(HEAD, deltas)

    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "ab"), (1, "x")]
    assert answer.choices[0].stop_reason == "END"
    assert [choice.text for choice in completion(HEAD, deltas).choices] == ["ab", "x"]


def events(raw: bytes) -> list[Any]:
    parts = raw.decode().split("\n\n")
    assert parts.pop() == "" and all(part.startswith("data: ") for part in parts)
    return [part[6:] if part == "data: [DONE]" else msgspec.json.decode(part[6:]) for part in parts]


def test_the_first_chunk_carries_the_role_and_only_the_last_a_reason() -> None:
    chunks = ChunkStream.of_chat(HEAD, include_usage=False)
    (first,) = events(chunks.encode([OutputDelta(index=0, text="a")]))
    (final,) = events(chunks.encode([last(0)]))

    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": "a"}, "logprobs": None, "finish_reason": None}
    ]
    assert final["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}
    ]
    assert "usage" not in first
    assert events(chunks.encode_end()) == ["[DONE]"]


def test_an_event_is_the_whole_chunk_as_the_schema_has_it() -> None:
    """The envelope is encoded apart from the choice, and must not show it, whatever the client calls its model."""
    head = AnswerHead(id="id", created=7, model='"choices":[] é', has_logprobs=False, num_samples=1)
    (event,) = events(ChunkStream.of_completion(head, include_usage=True).encode([OutputDelta(index=0, text='"\n')]))
    choice = CompletionChoice(index=0, text='"\n')
    whole = Completion(
        id="id", created=7, model=head.model, system_fingerprint=FINGERPRINT, choices=(choice,), usage=None
    )
    assert event == msgspec.json.decode(msgspec.json.encode(whole))


def test_usage_in_chunks_is_null_until_the_end() -> None:
    chunks = ChunkStream.of_chat(HEAD, include_usage=True)
    (chunk,) = events(chunks.encode([last(0)]))
    usage, done = events(chunks.encode_end())

    assert chunk["usage"] is None
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 2, "[DONE]")


def test_a_batch_has_one_event_per_choice_that_has_something_to_say() -> None:
    chunks = ChunkStream.of_completion(HEAD, include_usage=False)
    batch = [OutputDelta(index=0, text="a"), OutputDelta(index=1), OutputDelta(index=2, text="c")]

    assert [event["choices"][0]["index"] for event in events(chunks.encode(batch))] == [0, 2]
    assert chunks.encode([OutputDelta(index=1)]) == b""


def test_logprobs_in_both_forms() -> None:
    with_logprobs = AnswerHead(id="id", created=1, model="m", has_logprobs=True, num_samples=1)
    entry = TextLogprob(token="é", token_id=7, logprob=-1.0, text_offset=4, top=(("e", 8, -0.5),))
    delta = OutputDelta(index=0, text="é", logprobs=(entry,), finish_reason="length", usage=Usage(1, 1))

    chat = chat_completion(with_logprobs, {0: [delta]}).choices[0].logprobs
    older = completion(with_logprobs, {0: [delta]}).choices[0].logprobs

    assert chat is not None
    assert older is not None
    assert chat.content[0].bytes == (0xC3, 0xA9)
    assert chat.content[0].top_logprobs[0].token == "e"
    assert older.top_logprobs == ({"e": -0.5, "é": -1.0},)
    assert older.text_offset == (4,)
