"""Bodies of the embedding, rerank and score routes to jobs, and what comes back to bodies."""

from __future__ import annotations

import json
import math
from array import array
from typing import Any

import msgspec
import pytest

from app.schema.embeddings import EmbeddingRequest, PoolingRequest
from app.schema.rerank import RerankRequest, ScoreRequestBody
from app.translate.embeddings import embed_job, embedding_list, pooling_answer
from app.translate.job import EmbedJob, ScoreJob
from app.translate.rerank import rerank_answer, rerank_job, score_job
from engine.api.errors import InvalidParameter
from engine.api.output import Pooled, Scores
from engine.api.request import EmbedRequest, ScoreRequest


def embedding(given: Any = "a", kind: type[EmbeddingRequest] = EmbeddingRequest, **fields: Any) -> EmbedJob:
    body = msgspec.convert({"model": "m", "input": given, **fields}, kind)
    return embed_job(body, max_keep_alive=math.inf)


def rerank_body(*documents: Any, **fields: Any) -> RerankRequest:
    return msgspec.convert({"model": "m", "query": "q", "documents": documents, **fields}, RerankRequest)


def rerank(*documents: Any, **fields: Any) -> ScoreJob:
    return rerank_job(rerank_body(*documents, **fields), max_keep_alive=math.inf)


def scores_of(first: Any, second: Any) -> tuple[tuple[str, str], ...]:
    body = msgspec.convert({"model": "m", "text_1": first, "text_2": second}, ScoreRequestBody)
    return score_job(body, max_keep_alive=math.inf).request.pairs


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ([[1, 2], "a"], ((1, 2), "a")),
        ("", ("",)),
    ],
)
def test_forms_of_input(given: Any, inputs: tuple[Any, ...]) -> None:
    assert embedding(given) == EmbedJob("m", EmbedRequest(inputs=inputs))


def test_fields_of_an_embedding() -> None:
    job = embedding(dimensions=4, truncate_prompt_tokens=9, instruction="Find it", user="ann", keep_alive="5m")

    assert job.request == EmbedRequest(inputs=("a",), dimensions=4, truncate_tokens=9, instruction="Find it")
    assert job.keep_alive == 300.0
    assert embedding(truncate=True).request.truncate_tokens == -1
    assert embedding(truncate=True, truncate_prompt_tokens=9).request.truncate_tokens == 9
    assert embedding(truncate=False).request.truncate_tokens is None
    assert embedding(input_type="search_query").request.input_type == "query"
    assert embedding(input_type="passage").request.input_type == "document"
    assert embedding(kind=PoolingRequest, task="embed") == embedding()


def test_null_means_not_given() -> None:
    names = [field.name for field in msgspec.structs.fields(EmbeddingRequest) if field.name not in ("model", "input")]

    assert embedding(**dict.fromkeys(names)) == embedding()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"given": []}, "input"),
        ({"given": [1, "a"]}, "input"),
        ({"given": [1, [2]]}, "input"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"normalize": False}, "normalize"),
        ({"priority": 1}, "priority"),
        ({"normalize": 1}, "normalize"),
    ],
)
def test_what_is_not_served_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        embedding(**fields)

    assert caught.value.param == param


def test_vectors_come_back_as_numbers_or_base64() -> None:
    values = array("f", [0.25, -1.5])
    pooled = [Pooled(values.tobytes(), 3), Pooled(values.tobytes(), 4)]

    numbers = json.loads(msgspec.json.encode(embedding_list("m", pooled, None)))
    text = json.loads(msgspec.json.encode(embedding_list("m", pooled, "base64")))
    other = json.loads(msgspec.json.encode(pooling_answer("id", 7, "m", pooled, "float")))

    assert numbers == {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": [0.25, -1.5]} for index in (0, 1)],
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    assert text["data"][0]["embedding"] == "AACAPgAAwL8="
    assert other["data"] == [{"object": "pooling", "index": index, "data": [0.25, -1.5]} for index in (0, 1)]


def test_rerank_pairs_the_query_with_each_document() -> None:
    job = rerank("a", {"text": "b"}, max_tokens_per_doc=5, truncate=True, instruction="Find it", rank_fields=["text"])

    assert job.request == ScoreRequest(
        pairs=(("q", "a"), ("q", "b")), instruction="Find it", truncate_tokens=-1, max_document_tokens=5
    )


@pytest.mark.parametrize(
    ("documents", "fields", "param"),
    [
        ((), {}, "documents"),
        (("a",), {"top_n": 0}, "top_n"),
        (("a",), {"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        (("a",), {"rank_fields": ["title"]}, "rank_fields"),
        (("a",), {"max_chunks_per_doc": 2}, "max_chunks_per_doc"),
    ],
)
def test_what_rerank_refuses(documents: tuple[Any, ...], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        rerank(*documents, **fields)

    assert caught.value.param == param


def test_the_best_document_comes_first_and_equals_keep_their_order() -> None:
    body = rerank_body("a", "b", "c", top_n=2)

    answer = rerank_answer("id", body, Scores((0.5, 0.9, 0.5), 12), returns_documents=True)

    results = [(one.index, one.relevance_score, one.document) for one in answer.results]
    assert [(index, score) for index, score, _ in results] == [(1, 0.9), (0, 0.5)]
    assert json.loads(msgspec.json.encode(answer))["results"][0]["document"] == {"text": "b"}
    assert answer.usage.total_tokens == 12


def test_scores_of_one_against_many_or_of_as_many() -> None:
    assert scores_of("a", "b") == (("a", "b"),)
    assert scores_of("a", ["b", "c"]) == (("a", "b"), ("a", "c"))
    assert scores_of(["a"], ["b", "c"]) == (("a", "b"), ("a", "c"))
    assert scores_of(["a", "b"], ["c", "d"]) == (("a", "c"), ("b", "d"))
    for first, second in ((["a", "b"], "c"), (["a", "b"], ["c", "d", "e"]), ([], ["a"]), ("a", []), ([], [])):
        with pytest.raises(InvalidParameter):
            scores_of(first, second)
