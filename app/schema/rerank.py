"""Bodies of the rerank routes (Jina's and Cohere's dialects) and of /score (vLLM's): msgspec structs, no behaviour.

Requests refuse fields they do not list.  None means "not given" for every optional field.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from app.schema.embeddings import PooledUsage


class DocumentBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class JudgingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the routes share.

    `truncate_prompt_tokens` has the end of a longer pair left out, -1 at what the model takes, which is also what
    `truncate` means; `instruction` says the task to models that are told it; `keep_alive` is how long the model stays
    in memory afterwards, in Ollama's grammar.
    """

    model: str
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncate: bool | None = None
    instruction: str | None = None
    keep_alive: str | int | float | None = None

    priority: Any = None


class RerankRequest(JudgingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /rerank, /v1/rerank and /v2/rerank.

    `top_n` is how many of the best are answered; of each document no more than `max_tokens_per_doc` tokens count.
    """

    query: str
    documents: tuple[str | DocumentBody, ...]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None

    max_chunks_per_doc: Any = None
    rank_fields: Any = None


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """`index` is the document's place in the request."""

    index: int
    relevance_score: float
    document: DocumentBody | UnsetType = UNSET


class RerankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The documents, best first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: tuple[RankedDocument, ...]
    usage: PooledUsage


class ScoreRequestBody(JudgingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /score and /v1/score: one text against each of the others, or as many against as many."""

    text_1: str | tuple[str, ...]
    text_2: str | tuple[str, ...]


class ScoredPair(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One score per pair, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: tuple[ScoredPair, ...]
    usage: PooledUsage
