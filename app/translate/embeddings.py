"""Bodies of /v1/embeddings and /pooling ↔ `EmbedJob` and its vectors: pure functions, no model and no I/O.

What a client asks for is either passed on or refused by name.  Called by `app.api.embeddings`.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from app.keep_alive import granted_keep_alive
from app.schema.embeddings import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EncodingFormat,
    InputType,
    PooledText,
    PooledUsage,
    PoolingAnswer,
)
from app.translate.job import EmbedJob
from app.translate.prompts import split_prompts
from app.translate.refusal import refuse_unsupported
from engine.api.output import Pooled
from engine.api.request import TRUNCATE_TO_CONTEXT, EmbedRequest

_DEFAULTS_ONLY: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "normalize": (True,),
    "priority": (0,),
}
_SIDES: dict[InputType | None, Literal["query", "document"] | None] = {
    None: None,
    "query": "query",
    "search_query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
}

_encode_json = msgspec.json.Encoder().encode


def embed_job(body: EmbeddingRequest, *, max_keep_alive: float) -> EmbedJob:
    """`max_keep_alive` is the most that the client is granted, in seconds.

    Raises `InvalidParameter` for the first field that cannot be served.
    """
    refuse_unsupported(body, _DEFAULTS_ONLY)
    request = EmbedRequest(
        inputs=tuple(split_prompts(body.input, "input")),
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        input_type=_SIDES[body.input_type],
        instruction=body.instruction,
        truncate_tokens=truncation(body.truncate_prompt_tokens, body.truncate),
    )
    return EmbedJob(body.model, request, granted_keep_alive(body.keep_alive, max_keep_alive))


def truncation(truncate_prompt_tokens: int | None, truncate: bool | None) -> int | None:
    """How many tokens of a longer text count; None where too many are an error."""
    if truncate_prompt_tokens is None and truncate:
        return TRUNCATE_TO_CONTEXT
    return truncate_prompt_tokens


def embedding_list(model: str, pooled: Sequence[Pooled], encoding_format: EncodingFormat | None) -> EmbeddingList:
    """The answer in OpenAI's shape; the vectors are JSON already."""
    data = tuple(
        Embedding(index=index, embedding=vector) for index, vector in enumerate(_encode(pooled, encoding_format))
    )
    return EmbeddingList(data=data, model=model, usage=pooled_usage(pooled))


def pooling_answer(
    answer_id: str, created: int, model: str, pooled: Sequence[Pooled], encoding_format: EncodingFormat | None
) -> PoolingAnswer:
    """The answer in vLLM's shape; the vectors are JSON already."""
    data = tuple(PooledText(index=index, data=vector) for index, vector in enumerate(_encode(pooled, encoding_format)))
    return PoolingAnswer(id=answer_id, created=created, model=model, data=data, usage=pooled_usage(pooled))


def pooled_usage(pooled: Sequence[Pooled]) -> PooledUsage:
    num_tokens = sum(one.num_tokens for one in pooled)
    return PooledUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def _encode(pooled: Sequence[Pooled], encoding_format: EncodingFormat | None) -> Iterator[msgspec.Raw]:
    """Each vector by itself: all together would hold up a program's other threads for too long."""
    for one in pooled:
        if encoding_format == "base64":
            yield msgspec.Raw(b'"' + base64.b64encode(one.values) + b'"')
        else:
            yield msgspec.Raw(_encode_json(array("f", one.values).tolist()))
