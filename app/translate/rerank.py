"""Bodies of the rerank and score routes ↔ `ScoreJob` and its scores: pure functions, no model and no I/O.

What a client asks for is either passed on or refused by name.  Called by `app.api.rerank`.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from app.keep_alive import granted_keep_alive
from app.schema.embeddings import PooledUsage
from app.schema.rerank import (
    DocumentBody,
    JudgingFields,
    RankedDocument,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoredPair,
    ScoreRequestBody,
)
from app.translate.embeddings import truncation
from app.translate.job import ScoreJob
from app.translate.refusal import refuse_unsupported
from engine.api.errors import InvalidParameter
from engine.api.output import Scores
from engine.api.request import ScoreRequest

_DEFAULTS_ONLY: dict[str, tuple[Any, ...]] = {
    "priority": (0,),
    "max_chunks_per_doc": (),
    "rank_fields": ([], ["text"]),
}


def rerank_job(body: RerankRequest, *, max_keep_alive: float) -> ScoreJob:
    """`max_keep_alive` is the most that the client is granted, in seconds.

    Raises `InvalidParameter` for the first field that cannot be served.
    """
    for name in ("top_n", "max_tokens_per_doc"):
        value = getattr(body, name)
        if value is not None and value < 1:
            raise InvalidParameter(name, f"{name} is {value}; give at least 1.")
    pairs = tuple((body.query, text) for text in _texts(body))
    return _job(body, pairs, "documents", max_keep_alive, max_document_tokens=body.max_tokens_per_doc)


def score_job(body: ScoreRequestBody, *, max_keep_alive: float) -> ScoreJob:
    """As `rerank_job`."""
    firsts = (body.text_1,) if isinstance(body.text_1, str) else body.text_1
    seconds = (body.text_2,) if isinstance(body.text_2, str) else body.text_2
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidParameter(
            "text_1",
            f"text_1 has {len(firsts):,} texts and text_2 has {len(seconds):,}; give one text_1, or as many as text_2.",
        )
    return _job(body, tuple(zip(firsts, seconds, strict=True)), "text_2", max_keep_alive)


def rerank_answer(answer_id: str, body: RerankRequest, scores: Scores, *, returns_documents: bool) -> RerankAnswer:
    """The best documents first; of equal ones the first in the request."""
    ranked = sorted(enumerate(scores.values), key=lambda item: (-item[1], item[0]))
    texts = _texts(body)
    return RerankAnswer(
        id=answer_id,
        model=body.model,
        results=tuple(
            RankedDocument(
                index=index,
                relevance_score=score,
                document=DocumentBody(texts[index]) if returns_documents else UNSET,
            )
            for index, score in ranked[: body.top_n]
        ),
        usage=_usage(scores),
    )


def score_answer(answer_id: str, created: int, model: str, scores: Scores) -> ScoreAnswer:
    data = tuple(ScoredPair(index=index, score=score) for index, score in enumerate(scores.values))
    return ScoreAnswer(id=answer_id, created=created, model=model, data=data, usage=_usage(scores))


def _job(
    body: JudgingFields,
    pairs: tuple[tuple[str, str], ...],
    param: str,
    max_keep_alive: float,
    max_document_tokens: int | None = None,
) -> ScoreJob:
    refuse_unsupported(body, _DEFAULTS_ONLY)
    if not pairs:
        raise InvalidParameter(param, f"{param} must not be empty.")
    request = ScoreRequest(
        pairs=pairs,
        instruction=body.instruction,
        truncate_tokens=truncation(body.truncate_prompt_tokens, body.truncate),
        max_document_tokens=max_document_tokens,
        param=param,
    )
    return ScoreJob(body.model, request, granted_keep_alive(body.keep_alive, max_keep_alive))


def _texts(body: RerankRequest) -> list[str]:
    return [document if isinstance(document, str) else document.text for document in body.documents]


def _usage(scores: Scores) -> PooledUsage:
    return PooledUsage(prompt_tokens=scores.num_tokens, total_tokens=scores.num_tokens)
