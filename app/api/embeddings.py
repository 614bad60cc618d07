"""POST /v1/embeddings in OpenAI's dialect and POST /pooling in vLLM's: texts to vectors.

Routes translate, nothing else: body → `app.translate.embeddings` → `app.pooling` → back.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from litestar import Request, Response, post
from litestar.openapi import ResponseSpec

from app.api.body import JsonBody
from app.api.disconnect import unless_disconnected
from app.api.openai import ERRORS
from app.pooling import embed
from app.residency.supervisor import Supervisor
from app.schema.embeddings import EmbeddingList, EmbeddingRequest, PoolingAnswer, PoolingRequest
from app.settings import Settings
from app.translate.embeddings import embed_job, embedding_list, pooling_answer


@post(
    "/v1/embeddings",
    dto=JsonBody,
    status_code=200,
    responses={200: ResponseSpec(EmbeddingList, description="One vector per text."), **ERRORS},
    tags=["OpenAI"],
)
async def create_embeddings(
    data: EmbeddingRequest, request: Request[Any, Any, Any], supervisor: Supervisor, settings: Settings
) -> Response[Any]:
    """Turn texts into vectors."""
    job = embed_job(data, max_keep_alive=settings.max_keep_alive)
    pooled = await unless_disconnected(request.receive, embed(supervisor, job))
    return Response(await asyncio.to_thread(embedding_list, data.model, pooled, data.encoding_format))


@post(
    "/pooling",
    dto=JsonBody,
    status_code=200,
    responses={200: ResponseSpec(PoolingAnswer, description="One vector per text."), **ERRORS},
    tags=["Embedding and reranking"],
)
async def create_pooling(
    data: PoolingRequest, request: Request[Any, Any, Any], supervisor: Supervisor, settings: Settings
) -> Response[Any]:
    """Turn texts into vectors; the shape of the answer is vLLM's."""
    job = embed_job(data, max_keep_alive=settings.max_keep_alive)
    pooled = await unless_disconnected(request.receive, embed(supervisor, job))
    answer_id = f"pool-{secrets.token_hex(16)}"
    answer = await asyncio.to_thread(
        pooling_answer, answer_id, int(time.time()), data.model, pooled, data.encoding_format
    )
    return Response(answer)


embedding_routes = (create_embeddings, create_pooling)
