"""Reranking in Jina's and Cohere's dialects, and scores of pairs in vLLM's.

Routes translate, nothing else: body → `app.translate.rerank` → `app.pooling` → back.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from litestar import Request, post
from litestar.openapi import ResponseSpec

from app.api.body import JsonBody
from app.api.disconnect import unless_disconnected
from app.api.openai import ERRORS
from app.pooling import score
from app.residency.supervisor import Supervisor
from app.schema.rerank import RerankAnswer, RerankRequest, ScoreAnswer, ScoreRequestBody
from app.settings import Settings
from app.translate.rerank import rerank_answer, rerank_job, score_answer, score_job

_TAGS = ["Embedding and reranking"]
_RANKED = {200: ResponseSpec(RerankAnswer, description="The documents, best first."), **ERRORS}
_SCORED = {200: ResponseSpec(ScoreAnswer, description="One score per pair."), **ERRORS}


@post(["/rerank", "/v1/rerank"], dto=JsonBody, status_code=200, responses=_RANKED, tags=_TAGS)
async def rerank(
    data: RerankRequest, request: Request[Any, Any, Any], supervisor: Supervisor, settings: Settings
) -> RerankAnswer:
    """Sort documents by how well they answer a query; their texts come back unless return_documents is false."""
    return await _rerank(data, request, supervisor, settings, returns_documents=data.return_documents is not False)


@post("/v2/rerank", dto=JsonBody, status_code=200, responses=_RANKED, tags=_TAGS)
async def rerank_without_texts(
    data: RerankRequest, request: Request[Any, Any, Any], supervisor: Supervisor, settings: Settings
) -> RerankAnswer:
    """As /v1/rerank, in Cohere's second version: texts come back only where return_documents is true."""
    return await _rerank(data, request, supervisor, settings, returns_documents=data.return_documents is True)


@post(["/score", "/v1/score"], dto=JsonBody, status_code=200, responses=_SCORED, tags=_TAGS)
async def score_pairs(
    data: ScoreRequestBody, request: Request[Any, Any, Any], supervisor: Supervisor, settings: Settings
) -> ScoreAnswer:
    """Say how well texts go together, pair by pair."""
    job = score_job(data, max_keep_alive=settings.max_keep_alive)
    scores = await unless_disconnected(request.receive, score(supervisor, job))
    return score_answer(f"score-{secrets.token_hex(16)}", int(time.time()), data.model, scores)


async def _rerank(
    data: RerankRequest,
    request: Request[Any, Any, Any],
    supervisor: Supervisor,
    settings: Settings,
    *,
    returns_documents: bool,
) -> RerankAnswer:
    job = rerank_job(data, max_keep_alive=settings.max_keep_alive)
    scores = await unless_disconnected(request.receive, score(supervisor, job))
    return rerank_answer(f"rerank-{secrets.token_hex(16)}", data, scores, returns_documents=returns_documents)


rerank_routes = (rerank, rerank_without_texts, score_pairs)
