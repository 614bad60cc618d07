"""Request bodies: what decodes, and how an error names the field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from app.api.body import decode_body
from app.errors import BadRequest
from app.schema.openai import ChatRequest, CompletionRequest

USER = {"role": "user", "content": "hi"}


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


def test_null_means_not_given_for_every_optional_field() -> None:
    optional = [field.name for field in msgspec.structs.fields(ChatRequest) if field.name not in ("model", "messages")]

    body = decode_body(chat_body(**dict.fromkeys(optional)), ChatRequest)

    assert body == decode_body(chat_body(), ChatRequest)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "0.5"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"surprise": 1}, "surprise"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "pirate", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{**USER, "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages[0].content[0].type",
        ),
        ({"stream_options": {"include_everything": True}}, "stream_options.include_everything"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"model": None}, "model"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_body(chat_body(**fields), ChatRequest)

    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert caught.value.param in caught.value.message


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
def test_numbers_that_are_not_finite_name_their_field(number: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_body(b'{"model": "m", "messages": [], "temperature": ' + number + b"}", ChatRequest)

    assert caught.value.param == "temperature"


@pytest.mark.parametrize("raw", [b"", b"{", b'{"a": NaN, }', b"NaN", b"\xff", b"[" * 10_000])
def test_malformed_json_is_one_sentence(raw: bytes) -> None:
    with pytest.raises(BadRequest, match=r"\.$"):
        decode_body(raw, ChatRequest)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompts_come_in_four_forms(prompt: Any) -> None:
    raw = json.dumps({"model": "m", "prompt": prompt}).encode()

    assert msgspec.to_builtins(decode_body(raw, CompletionRequest).prompt, builtin_types=()) is not None
