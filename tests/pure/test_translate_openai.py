"""OpenAI bodies to engine requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from app.schema.openai import ChatRequest, CompletionRequest
from app.translate.job import GenerateJob
from app.translate.openai import chat_job, completion_job
from engine.api.errors import InvalidParameter

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> GenerateJob:
    return chat_job(
        msgspec.convert({"model": "m", "messages": [USER], **fields}, ChatRequest), "id-1", max_keep_alive=3600
    )


def completion(prompt: Any, **fields: Any) -> GenerateJob:
    return completion_job(
        msgspec.convert({"model": "m", "prompt": prompt, **fields}, CompletionRequest), "id-1", max_keep_alive=3600
    )


def test_a_silent_request_leaves_everything_to_the_model() -> None:
    job = chat()
    (request,) = job.requests({"temperature": 0.2, "top_p": 0.9})

    assert job.overrides == {}
    assert request.request_id == "id-1"
    assert request.messages == (USER,)
    assert (request.sampling.temperature, request.sampling.top_p) == (0.2, 0.9)
    assert request.sampling.max_tokens is None


def test_what_the_client_gives_wins_over_the_models_defaults() -> None:
    (request,) = chat(temperature=1.0, top_k=5, stop="x", seed=7).requests({"temperature": 0.2, "top_p": 0.9})

    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.9, 5)
    assert (sampling.stop, sampling.seed) == (("x",), 7)


def test_messages_become_what_templates_know() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]

    assert chat(messages=messages).prompts[0].messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": False}, None),
    ],
)
def test_chat_logprobs(fields: dict[str, Any], expected: int | None) -> None:
    assert chat(**fields).requests({})[0].sampling.logprobs == expected


def test_both_names_of_the_token_limit() -> None:
    assert chat(max_completion_tokens=5).overrides["max_tokens"] == 5
    assert chat(max_tokens=5, max_completion_tokens=5).overrides["max_tokens"] == 5
    with pytest.raises(InvalidParameter, match="differ"):
        chat(max_tokens=5, max_completion_tokens=6)


@pytest.mark.parametrize(
    ("asked", "granted"), [(None, None), ("5m", 300), (0, 0), (600.5, 600.5), ("2h", 3600), (-1, 3600), ("-1", 3600)]
)
def test_how_long_the_model_stays_is_capped_but_never_refused(asked: str | float | None, granted: float | None) -> None:
    assert chat(keep_alive=asked).keep_alive == granted
    assert completion("a", keep_alive=asked).keep_alive == granted


def test_a_keep_alive_that_is_no_duration_is_refused_by_name() -> None:
    with pytest.raises(InvalidParameter, match="keep_alive 'soon' is not a duration") as refused:
        chat(keep_alive="soon")
    assert refused.value.param == "keep_alive"


def test_completions_keep_openais_default_length() -> None:
    assert completion("a").overrides["max_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2], [(None, (1, 2))]),
        ([[1], [2, 3]], [(None, (1,)), (None, (2, 3))]),
        ([""], [("", None)]),
    ],
)
def test_prompt_forms(prompt: Any, expected: Any) -> None:
    assert [(one.text, one.token_ids) for one in completion(prompt).prompts] == expected


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]]])
def test_prompts_that_are_no_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        completion(prompt)

    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("response_format", {"type": "json_schema"}),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("reasoning_effort", "low"),
        ("parallel_tool_calls", 1),
        ("stop", ["x"] * 17),
        ("stop", [""]),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("min_p", 2.0),
        ("n", 0),
        ("n", 1000),
        ("presence_penalty", 3.0),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("top_logprobs", 2),
        ("add_special_tokens", True),
        ("stream_options", {"include_usage": True}),
        ("messages", []),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        chat(**{name: value})

    assert caught.value.param == name


@pytest.mark.parametrize("name", ["echo", "suffix", "best_of"])
def test_completion_fields_that_are_not_supported(name: str) -> None:
    values = {"echo": True, "suffix": "x", "best_of": 2}
    with pytest.raises(InvalidParameter) as caught:
        completion("a", **{name: values[name]})

    assert caught.value.param == name


def test_values_that_ask_for_the_default_are_accepted() -> None:
    chat(
        tools=[], tool_choice="none", response_format={"type": "text"}, store=False, service_tier="auto", user="ann",
        modalities=["text"], parallel_tool_calls=True, metadata={}, n=1, stream_options=None, safety_identifier="x",
    )  # fmt: skip
    completion("a", echo=False, best_of=1, suffix="", user="ann")


def test_choices_are_bounded() -> None:
    with pytest.raises(InvalidParameter, match="1,280"):
        completion(["a"] * 10, n=128)


@pytest.mark.parametrize("name", ["tool_calls", "refusal", "audio", "function_call"])
def test_message_fields_that_are_not_supported(name: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        chat(messages=[{**USER, name: {"a": 1}}])

    assert caught.value.param == f"messages[0].{name}"
