"""Vectors and scores through the real daemon on a real socket; only the engine behind it is a fake."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.daemon import FakeDaemon, eventually, running_daemon
from tests.fakes.tiny_embedder import MAX_LENGTH, VOCABULARY, write_tiny_cross_encoder, write_tiny_embedder
from tests.fakes.tiny_model import loads, write_tiny_model
from tests.fakes.worker import EMBEDDING_LENGTH


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("daemon")


@pytest.fixture(scope="module")
def daemon(home: Path) -> Iterator[FakeDaemon]:
    with running_daemon(home, QUIRE_MAX_QUEUE="4") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def embedder(home: Path) -> str:
    return str(write_tiny_embedder(home / "embedder"))


@pytest.fixture(scope="module")
def reranker(home: Path) -> str:
    return str(write_tiny_cross_encoder(home / "cross-encoder"))


@pytest.fixture(scope="module")
def chat_model(home: Path) -> str:
    return str(write_tiny_model(home / "echo"))


@pytest.fixture
async def http(daemon: FakeDaemon) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=30) as client:
        yield client


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ids(*words: str) -> list[int]:
    return [VOCABULARY[word] for word in ("[CLS]", *words, "[SEP]")]


def vector_of(token_ids: list[int], dimensions: int = EMBEDDING_LENGTH) -> list[float]:
    """What the fake worker makes of these ids."""
    counts = [sum(token_id % EMBEDDING_LENGTH == place for token_id in token_ids) for place in range(dimensions)]
    return [count / math.hypot(*counts) for count in counts]


async def refused(http: httpx.AsyncClient, route: str, body: dict[str, Any]) -> tuple[int, str, str | None, str]:
    answer = await http.post(route, json=body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"], error["message"]


def test_the_official_client_gets_vectors_and_counts(client: openai.OpenAI, embedder: str) -> None:
    """Its default is base64, which it decodes itself."""
    answer = client.embeddings.create(model=embedder, input=["The cat sat", "the dogs"])

    assert answer.object == "list"
    assert answer.model == embedder
    assert [entry.index for entry in answer.data] == [0, 1]
    assert answer.data[0].embedding == pytest.approx(vector_of(ids("the", "cat", "sat")), abs=1e-6)
    assert answer.data[1].embedding == pytest.approx(vector_of(ids("the", "dog", "##s")), abs=1e-6)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (10, 10)


async def test_floats_and_base64_are_the_same_numbers(http: httpx.AsyncClient, embedder: str) -> None:
    body = {"model": embedder, "input": "the cat"}

    floats = (await http.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"]
    text = (await http.post("/v1/embeddings", json={**body, "encoding_format": "base64"})).json()["data"][0][
        "embedding"
    ]

    assert list(struct.unpack(f"<{EMBEDDING_LENGTH}f", base64.b64decode(text))) == floats


@pytest.mark.parametrize(
    "given", [[2, 5, 3], [[2, 5, 3], [2, 6, 3]], ["cat", "dog"], "cat"], ids=["ids", "lists of ids", "texts", "text"]
)
async def test_every_form_of_input(http: httpx.AsyncClient, embedder: str, given: Any) -> None:
    answer = (await http.post("/v1/embeddings", json={"model": embedder, "input": given})).json()

    assert answer["data"][0]["embedding"] == pytest.approx(vector_of(ids("cat")), abs=1e-6)
    assert len(answer["data"]) == (2 if isinstance(given, list) and not isinstance(given[0], int) else 1)


async def test_dimensions_shorten_the_vector(http: httpx.AsyncClient, embedder: str) -> None:
    body = {"model": embedder, "input": "the cat sat", "dimensions": 4}

    answer = (await http.post("/v1/embeddings", json=body)).json()

    assert answer["data"][0]["embedding"] == pytest.approx(vector_of(ids("the", "cat", "sat"), 4), abs=1e-6)


async def test_the_models_own_prompts_go_before_texts(http: httpx.AsyncClient, embedder: str) -> None:
    async def tokens(**fields: Any) -> int:
        answer = await http.post("/v1/embeddings", json={"model": embedder, "input": "cat", **fields})
        return int(answer.json()["usage"]["prompt_tokens"])

    assert await tokens() == 3
    assert await tokens(input_type="query") == await tokens(prompt_name="query") == 6
    assert await tokens(input_type="search_document") == await tokens(prompt_name="passage") == 5


async def test_too_long_is_an_error_unless_truncation_is_asked_for(http: httpx.AsyncClient, embedder: str) -> None:
    body = {"model": embedder, "input": ["cat", "cat " * 100]}

    status, code, param, message = await refused(http, "/v1/embeddings", body)
    cut = (await http.post("/v1/embeddings", json={**body, "truncate_prompt_tokens": 5})).json()
    cut_to_context = (await http.post("/v1/embeddings", json={**body, "truncate": True})).json()

    assert (status, code, param) == (400, "context_length_exceeded", "input")
    assert "input[1] takes 102 tokens, and the model takes 16" in message
    assert cut["usage"]["prompt_tokens"] == 3 + 5
    assert cut_to_context["usage"]["prompt_tokens"] == 3 + MAX_LENGTH


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "cat"]}, "input"),
        ({"input": [999]}, "input"),
        ({"dimensions": EMBEDDING_LENGTH + 1}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": MAX_LENGTH + 1}, "truncate_prompt_tokens"),
        ({"prompt_name": "poem"}, "prompt_name"),
        ({"instruction": "be kind"}, "instruction"),
        ({"prompt_name": "query", "input_type": "query"}, "prompt_name"),
        ({"input": [2, 3], "prompt_name": "query"}, "prompt_name"),
        ({"normalize": False}, "normalize"),
        ({"surprise": 1}, "surprise"),
        ({"keep_alive": "soon"}, "keep_alive"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    http: httpx.AsyncClient, embedder: str, fields: dict[str, Any], param: str
) -> None:
    status, _, named, message = await refused(http, "/v1/embeddings", {"model": embedder, "input": "cat", **fields})

    assert status == 400
    assert (named or "").startswith(param)
    assert message.endswith(".")


async def test_a_model_is_asked_for_what_it_does(
    http: httpx.AsyncClient, embedder: str, reranker: str, chat_model: str
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    pair = {"query": "cat", "documents": ["dog"]}

    for route, body, says in (
        ("/v1/embeddings", {"model": chat_model, "input": "hi"}, "choose an embedding model"),
        ("/v1/rerank", {"model": chat_model, **pair}, "choose a reranker"),
        ("/v1/chat/completions", {"model": embedder, "messages": messages}, "is an embedding model; send its texts to"),
        ("/v1/completions", {"model": reranker, "prompt": "hi"}, "is a reranker; send its queries and documents to"),
        ("/v1/embeddings", {"model": reranker, "input": "hi"}, "choose an embedding model"),
    ):
        status, code, param, message = await refused(http, route, body)
        assert (status, code, param) == (400, "wrong_task", "model"), route
        assert says in message


async def test_a_model_is_not_loaded_for_what_it_does_not_do(http: httpx.AsyncClient, home: Path) -> None:
    directory = write_tiny_embedder(home / "never-loaded")

    status, code, _, _ = await refused(http, "/v1/completions", {"model": str(directory), "prompt": "hi"})

    assert (status, code) == (400, "wrong_task")
    assert loads(directory) == []


async def test_rerank_sorts_documents(http: httpx.AsyncClient, reranker: str) -> None:
    documents = ["the dog ran", {"text": "the cat sat"}, "cat"]
    body = {"model": reranker, "query": "the cat sat far", "documents": documents}

    answer = (await http.post("/v1/rerank", json=body)).json()
    best = (await http.post("/rerank", json={**body, "top_n": 1, "return_documents": False})).json()
    second_version = (await http.post("/v2/rerank", json=body)).json()

    # The fake counts the ids that both sides share, the last [SEP] among them, less 2; the model's own sigmoid follows.
    sigmoid = [1 / (1 + math.exp(2 - shared)) for shared in (2, 4, 2)]
    assert [result["index"] for result in answer["results"]] == [1, 0, 2]
    assert [result["document"]["text"] for result in answer["results"]] == ["the cat sat", "the dog ran", "cat"]
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(sorted(sigmoid, reverse=True))
    assert answer["usage"] == {"prompt_tokens": 3 * 7 + 7, "total_tokens": 3 * 7 + 7}
    assert best["results"] == [{"index": 1, "relevance_score": answer["results"][0]["relevance_score"]}]
    assert [set(result) for result in second_version["results"]] == [{"index", "relevance_score"}] * 3


async def test_scores_of_one_against_many_and_of_pairs(http: httpx.AsyncClient, reranker: str) -> None:
    one = {"model": reranker, "text_1": "the cat", "text_2": ["the cat", "dog"]}
    pairs = {"model": reranker, "text_1": ["the cat", "dog"], "text_2": ["the cat", "dog"]}

    against_many = (await http.post("/score", json=one)).json()
    pair_by_pair = (await http.post("/v1/score", json=pairs)).json()

    assert [(entry["index"], entry["object"]) for entry in against_many["data"]] == [(0, "score"), (1, "score")]
    assert against_many["data"][0]["score"] > against_many["data"][1]["score"]
    assert pair_by_pair["data"][0]["score"] == against_many["data"][0]["score"]
    assert against_many["usage"]["total_tokens"] == 7 + 6
    status, _, param, _ = await refused(http, "/score", {**pairs, "text_2": ["cat"]})
    assert (status, param) == (400, "text_1")


async def test_long_documents_are_cut_where_asked(http: httpx.AsyncClient, reranker: str) -> None:
    body = {"model": reranker, "query": "cat", "documents": ["dog " * 100]}

    status, code, param, _ = await refused(http, "/v1/rerank", body)
    by_document = (await http.post("/v1/rerank", json={**body, "max_tokens_per_doc": 4})).json()
    by_pair = (await http.post("/v1/rerank", json={**body, "truncate_prompt_tokens": 9})).json()

    assert (status, code, param) == (400, "context_length_exceeded", "documents")
    assert by_document["usage"]["total_tokens"] == 1 + 4 + 3
    assert by_pair["usage"]["total_tokens"] == 9


async def test_an_embedding_model_ranks_by_cosine(http: httpx.AsyncClient, embedder: str) -> None:
    body = {"model": embedder, "query": "the cat", "documents": ["dog ran", "the cat", "dog ran"]}

    answer = (await http.post("/v1/rerank", json=body)).json()

    def padded(*words: str) -> list[float]:
        return vector_of(ids(*words))

    query, match = padded("search", "for", ":", "the", "cat"), padded("passage", ":", "the", "cat")
    assert [result["index"] for result in answer["results"]] == [1, 0, 2]
    assert answer["results"][0]["relevance_score"] == pytest.approx(sum(map(float.__mul__, query, match)), abs=1e-6)
    assert answer["usage"]["total_tokens"] == 7 + 6 + 6  # a document that comes twice is read once


async def test_vllms_pooling_route(http: httpx.AsyncClient, embedder: str) -> None:
    body = {"model": embedder, "input": ["cat"], "task": "embed"}

    answer = (await http.post("/pooling", json=body)).json()

    assert (answer["object"], answer["data"][0]["object"]) == ("list", "pooling")
    assert answer["data"][0]["data"] == pytest.approx(vector_of(ids("cat")), abs=1e-6)


async def test_thousands_of_texts_let_others_in_between(http: httpx.AsyncClient, home: Path) -> None:
    """While 2048 texts are on their way, a single one is answered; it does not wait for all of them."""
    model = str(write_tiny_embedder(home / "slow", behaviour={"step_delay_s": 0.002}))
    texts = [" ".join(["cat"] * (1 + number % 12)) for number in range(2048)]
    await http.post("/v1/embeddings", json={"model": model, "input": "cat"})
    large = asyncio.create_task(http.post("/v1/embeddings", json={"model": model, "input": texts}))

    await eventually(lambda: _num_requests(http, model))
    await http.post("/v1/embeddings", json={"model": model, "input": "dog"})

    assert not large.done()
    answer = (await large).json()
    assert [entry["index"] for entry in answer["data"]] == list(range(2048))
    assert answer["usage"]["prompt_tokens"] == sum(3 + number % 12 for number in range(2048))
    assert answer["data"][5]["embedding"] == pytest.approx(vector_of(ids(*["cat"] * 6)), abs=1e-6)


async def _num_requests(http: httpx.AsyncClient, model: str) -> bool:
    running = (await http.get("/api/ps")).json()["models"]
    return any(entry["name"] == model and entry["num_requests"] > 0 for entry in running)


async def test_a_client_that_leaves_aborts_its_texts(http: httpx.AsyncClient, home: Path) -> None:
    model = str(write_tiny_embedder(home / "stalled", behaviour={"is_stalled": True}))
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/embeddings", json={"model": model, "input": ["cat", "dog"]}, timeout=2)

    async def is_idle() -> bool:
        return not await _num_requests(http, model)

    await eventually(is_idle)


async def test_a_worker_that_dies_ends_the_request_with_one_error(http: httpx.AsyncClient, home: Path) -> None:
    model = str(write_tiny_embedder(home / "dying", behaviour={"die_after_steps": 0}))

    status, code, _, _ = await refused(http, "/v1/embeddings", {"model": model, "input": ["cat", "dog"]})

    assert (status, code) == (503, "worker_died")


async def test_usage_and_latencies_are_counted(http: httpx.AsyncClient, embedder: str) -> None:
    await http.post("/v1/embeddings", json={"model": embedder, "input": ["cat", "the cat sat"]})

    (counted,) = [entry for entry in (await http.get("/api/usage")).json()["models"] if entry["model"] == embedder]
    metrics = (await http.get("/metrics")).text

    assert counted["prompt_max"] >= 5
    assert f'quire_e2e_request_latency_seconds_count{{model="{embedder}"}}' in metrics


async def test_the_routes_are_in_the_schema(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/schema/openapi.json")).json()

    routes = ("/v1/embeddings", "/pooling", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score")
    assert [route for route in routes if route not in schema["paths"]] == []
    assert "dimensions" in schema["components"]["schemas"]["EmbeddingRequest"]["properties"]
    assert "relevance_score" in schema["components"]["schemas"]["RankedDocument"]["properties"]
