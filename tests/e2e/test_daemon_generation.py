"""Generating through the real daemon on a real socket; only the engine behind it is a fake."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.daemon import FakeDaemon, eventually, running_daemon
from tests.fakes.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("daemon")


@pytest.fixture(scope="module")
def daemon(home: Path) -> Iterator[FakeDaemon]:
    with running_daemon(home, QUIRE_MAX_QUEUE="4", QUIRE_REQUEST_BODY_LIMIT_BYTES="100000") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def model(home: Path) -> str:
    return str(write_tiny_model(home / "echo"))


@pytest.fixture(scope="module")
def stalled_model(home: Path) -> str:
    return str(write_tiny_model(home / "stalled", behaviour={"is_stalled": True}))


@pytest.fixture
async def http(daemon: FakeDaemon) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=30) as client:
        yield client


def chat(model: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


async def gauge(http: httpx.AsyncClient, name: str, model: str) -> float:
    for line in (await http.get("/metrics")).text.splitlines():
        if line.startswith(f'{name}{{model="{model}"'):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{name} is not among the metrics")


def sse_payloads(text: str) -> list[str]:
    assert text.endswith("\n\n")
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


async def test_chat_answers_in_one_piece(http: httpx.AsyncClient, model: str) -> None:
    response = await http.post("/v1/chat/completions", json=chat(model))

    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == model
    assert answer["id"].startswith("chatcmpl-")
    assert len(answer["id"]) >= len("chatcmpl-") + 24
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_chat_streams_the_same_text(http: httpx.AsyncClient, model: str) -> None:
    body = chat(model, stream=True, stream_options={"include_usage": True})

    response = await http.post("/v1/chat/completions", json=body)

    payloads = sse_payloads(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert payloads[-1] == "[DONE]"
    *chunks, usage = [json.loads(payload) for payload in payloads[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_stream_without_include_usage_has_no_usage_field(http: httpx.AsyncClient, model: str) -> None:
    response = await http.post("/v1/chat/completions", json=chat(model, stream=True))

    assert "usage" not in response.text


async def test_a_stop_string_ends_the_choice_and_its_sequence(http: httpx.AsyncClient, model: str) -> None:
    body = chat(model, "abcdefgh", stop="de", ignore_eos=True, max_tokens=400)

    choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]

    assert choice["message"]["content"] == "abc"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "de")

    async def is_idle() -> bool:
        return await gauge(http, "quire_num_requests_running", model) == 0

    await eventually(is_idle)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_the_token_limit_ends_an_answer(http: httpx.AsyncClient, model: str, field: str) -> None:
    answer = (await http.post("/v1/chat/completions", json=chat(model, **{field: 3}))).json()

    assert answer["choices"][0]["message"]["content"] == "hel"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_several_prompts_and_samples_are_numbered_prompt_first(http: httpx.AsyncClient, model: str) -> None:
    body = {"model": model, "prompt": ["ab", "cde"], "n": 2, "max_tokens": 3, "ignore_eos": True}

    answer = (await http.post("/v1/completions", json=body)).json()

    assert answer["object"] == "text_completion"
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "aba"),
        (1, "aba"),
        (2, "cde"),
        (3, "cde"),
    ]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 12


async def test_prompts_may_be_token_ids(http: httpx.AsyncClient, model: str) -> None:
    one = {"model": model, "prompt": [66, 67], "max_tokens": 2}
    two = {"model": model, "prompt": [[66, 67], [68]], "max_tokens": 2}

    first = (await http.post("/v1/completions", json=one)).json()["choices"]
    second = (await http.post("/v1/completions", json=two)).json()["choices"]

    assert len(first) == 1
    assert len(second) == 2
    assert first[0]["text"] == second[0]["text"] != ""


async def test_a_streamed_completion_joins_to_the_whole_one(http: httpx.AsyncClient, model: str) -> None:
    body = {"model": model, "prompt": ["first one", "second"], "stream": True}

    payloads = sse_payloads((await http.post("/v1/completions", json=body)).text)

    texts = ["", ""]
    for payload in payloads[:-1]:
        for choice in json.loads(payload)["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["first one", "second"]
    assert payloads[-1] == "[DONE]"


async def test_logprobs_come_in_each_routes_own_form(http: httpx.AsyncClient, model: str) -> None:
    chat_body = chat(model, "hi", logprobs=True, top_logprobs=2, max_tokens=2)
    completion_body = {"model": model, "prompt": "hi", "logprobs": 2, "max_tokens": 2}

    chat_logprobs = (await http.post("/v1/chat/completions", json=chat_body)).json()["choices"][0]["logprobs"]
    logprobs = (await http.post("/v1/completions", json=completion_body)).json()["choices"][0]["logprobs"]

    assert [entry["token"] for entry in chat_logprobs["content"]] == ["h", "i"]
    assert chat_logprobs["content"][0]["bytes"] == [104]
    assert chat_logprobs["content"][0]["logprob"] == -0.25
    assert [len(entry["top_logprobs"]) for entry in chat_logprobs["content"]] == [2, 2]
    assert logprobs["tokens"] == ["h", "i"]
    assert logprobs["token_logprobs"] == [-0.25, -0.25]
    assert logprobs["top_logprobs"][0]["h"] == -0.25
    assert len(logprobs["text_offset"]) == 2


async def test_many_requests_at_once_keep_their_own_text(http: httpx.AsyncClient, model: str) -> None:
    texts = [f"request number {i}" for i in range(4)]

    answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=chat(model, text)) for text in texts))

    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == texts


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "nobody/nothing"}, 404, None, "model_not_found"),
        ({"temperature": "0.5"}, 400, "temperature", None),
        ({"temperature": -1}, 400, "temperature", None),
        ({"top_p": 0}, 400, "top_p", None),
        ({"messages": []}, 400, "messages", None),
        ({"messages": [{"role": "pirate", "content": "x"}]}, 400, "messages[0].role", None),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content", None),
        ({"tools": [{"type": "function"}]}, 400, "tools", None),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", None),
        ({"no_such_parameter": 1}, 400, "no_such_parameter", None),
        ({"max_tokens": 0}, 400, "max_tokens", None),
        ({"stop": ["x"] * 17}, 400, "stop", None),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias", None),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages", "context_length_exceeded"),
    ],
)
async def test_bad_requests_name_the_parameter(
    http: httpx.AsyncClient, model: str, fields: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    for stream in (False, True):
        response = await http.post("/v1/chat/completions", json={**chat(model), "stream": stream, **fields})

        error = response.json()["error"]
        assert response.status_code == status
        assert error["param"] == param
        assert error["message"].endswith(".")
        assert code is None or error["code"] == code
    assert (await http.post("/v1/chat/completions", json=chat(model))).status_code == 200


async def test_context_errors_give_both_token_counts(http: httpx.AsyncClient, model: str) -> None:
    response = await http.post("/v1/chat/completions", json=chat(model, "x" * 600))

    assert "601" in response.json()["error"]["message"]
    assert "512" in response.json()["error"]["message"]


async def test_bodies_that_are_no_json_requests(http: httpx.AsyncClient) -> None:
    json_type = {"content-type": "application/json"}
    path = "/v1/chat/completions"

    assert (await http.post(path, content=b"{", headers=json_type)).status_code == 400
    assert (await http.post(path, content=b"", headers=json_type)).status_code == 400
    assert (await http.post(path, content=b'{"temperature": NaN}', headers=json_type)).status_code == 400
    assert (await http.post(path, content=b"[" * 50_000, headers=json_type)).status_code == 400
    assert (await http.post(path, content=b"\xff\xfe", headers=json_type)).status_code == 400
    assert (await http.post(path, content=b"{}", headers={"content-type": "text/plain"})).status_code == 415
    assert (await http.post(path, content=b"x" * 100_001, headers=json_type)).status_code == 413


async def test_unknown_routes_and_methods_answer_in_openai_shape(http: httpx.AsyncClient) -> None:
    missing = await http.get("/v1/nothing")
    wrong = await http.get("/v1/chat/completions")

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(
    http: httpx.AsyncClient, stalled_model: str, stream: bool
) -> None:
    body = chat(stalled_model, "x" * 100, stream=stream)
    request = asyncio.create_task(http.post("/v1/chat/completions", json=body))

    async def is_running(count: int) -> bool:
        models = (await http.get("/api/ps")).json()["models"]
        if not any(entry["name"] == stalled_model and entry["pid"] for entry in models):
            return False
        return await gauge(http, "quire_num_requests_running", stalled_model) == count

    await eventually(lambda: is_running(1))
    assert await gauge(http, "quire_kv_cache_usage_perc", stalled_model) > 0
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)

    await eventually(lambda: is_running(0))
    assert await gauge(http, "quire_kv_cache_usage_perc", stalled_model) == 0
    running = {entry["name"]: entry["num_requests"] for entry in (await http.get("/api/ps")).json()["models"]}
    assert running[stalled_model] == 0


async def test_a_full_queue_is_refused(http: httpx.AsyncClient, stalled_model: str) -> None:
    async def num_open() -> int:
        models = (await http.get("/api/ps")).json()["models"]
        return sum(entry["num_requests"] for entry in models if entry["name"] == stalled_model)

    async def is_full() -> bool:
        return await num_open() == 4

    waiting = [asyncio.create_task(http.post("/v1/chat/completions", json=chat(stalled_model))) for _ in range(4)]
    try:
        await eventually(is_full)
        response = await http.post("/v1/chat/completions", json=chat(stalled_model))
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    assert response.status_code == 429
    assert response.json()["error"]["code"] == "queue_full"
    assert response.headers["retry-after"]


async def test_metrics_count_what_happened(http: httpx.AsyncClient, model: str) -> None:
    before = await gauge(http, "quire_generation_tokens_total", model)

    await http.post("/v1/chat/completions", json=chat(model))

    text = (await http.get("/metrics")).text
    assert await gauge(http, "quire_generation_tokens_total", model) == before + 6
    for name in (
        "quire_num_requests_running",
        "quire_num_requests_waiting",
        "quire_kv_cache_usage_perc",
        "quire_prefix_cache_queries_total",
        "quire_prefix_cache_hits_total",
        "quire_prompt_tokens_total",
        "quire_num_preemptions_total",
        "quire_time_to_first_token_seconds_bucket",
        "quire_inter_token_latency_seconds_bucket",
        "quire_e2e_request_latency_seconds_bucket",
    ):
        assert f'{name}{{model="{model}"' in text or f'{name}{{le="0.1",model="{model}"' in text
    assert 'quire_request_success_total{finished_reason="stop"' in text


async def test_the_schema_describes_bodies(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/schema/openapi.json")).json()

    request = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    component = schema["components"]["schemas"][request["$ref"].rsplit("/", 1)[1]]
    assert {"model", "messages", "temperature"} <= set(component["properties"])
    assert "200" in schema["paths"]["/v1/completions"]["post"]["responses"]


async def test_the_schema_page_needs_no_other_host(http: httpx.AsyncClient) -> None:
    response = await http.get("/schema")

    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "POST /v1/chat/completions" in response.text
    assert "<code>repetition_penalty</code>" in response.text
    assert not re.search(r"<script|https?://", response.text)


def test_the_official_blocking_client_works(daemon: FakeDaemon, model: str) -> None:
    http_client = httpx.Client(trust_env=False)
    with openai.OpenAI(base_url=f"{daemon.base_url}/v1", api_key="none", http_client=http_client) as client:
        completion = client.completions.create(model=model, prompt="hi you", stop=["you"])
        stream = client.completions.create(model=model, prompt="hi you", stream=True)
        streamed = "".join(chunk.choices[0].text for chunk in stream)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}], temperature=-1)

    assert completion.choices[0].text == "hi "
    assert streamed == "hi you"
    assert caught.value.param == "temperature"


async def test_the_official_async_client_works(daemon: FakeDaemon, model: str) -> None:
    http_client = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{daemon.base_url}/v1", api_key="none", http_client=http_client) as client:
        answer = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi you"}])
        stream = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "hi you"}], stream=True
        )
        streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nobody/nothing", messages=[{"role": "user", "content": "x"}])

    assert answer.choices[0].message.content == "hi you"
    assert "".join(streamed) == "hi you"
