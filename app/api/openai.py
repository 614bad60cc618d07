"""The OpenAI dialect: /v1/chat/completions, /v1/completions, /v1/models.

Routes translate and stream, nothing else: body → `app.translate.openai` → `app.generation` →
`app.translate.openai_output` → JSON or Server-Sent Events.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing
from typing import Any

from litestar import Request, Response, Router, get, post
from litestar.openapi import ResponseSpec

from app.api.body import JsonBody
from app.api.disconnect import unless_disconnected
from app.api.openai_stream import ChunkStream, answer_head, stream_answer
from app.generation import generate
from app.residency.supervisor import Supervisor
from app.schema.error import ErrorBody
from app.schema.openai import ChatCompletion, ChatRequest, Completion, CompletionRequest, ModelCard, ModelList
from app.settings import Settings
from app.translate.job import GenerateJob
from app.translate.openai import chat_job, completion_job
from app.translate.openai_output import chat_completion, completion
from engine.api.output import OutputDelta
from store.models import InstalledModel, ModelStore

ERRORS = {
    400: ResponseSpec(ErrorBody, description="The request cannot be served; `param` names the field."),
    404: ResponseSpec(ErrorBody, description="The model is not installed."),
    429: ResponseSpec(ErrorBody, description="The model has too many open requests."),
    503: ResponseSpec(ErrorBody, description="The model's worker ended; the next request starts a fresh one."),
}


@post(
    "/chat/completions",
    dto=JsonBody,
    status_code=200,
    responses={200: ResponseSpec(ChatCompletion, description="With stream: true, Server-Sent Events."), **ERRORS},
)
async def create_chat_completion(
    data: ChatRequest, request: Request[Any, Any, Any], supervisor: Supervisor, settings: Settings
) -> Response[Any]:
    job = chat_job(data, f"chatcmpl-{secrets.token_hex(16)}", max_keep_alive=settings.max_keep_alive)
    head = answer_head(job)
    if not data.stream:
        return Response(chat_completion(head, await _collect(request, supervisor, job)))
    chunks = ChunkStream.of_chat(head, include_usage=_wants_usage(data))
    return stream_answer(generate(supervisor, job), chunks, settings)


@post(
    "/completions",
    dto=JsonBody,
    status_code=200,
    responses={200: ResponseSpec(Completion, description="With stream: true, Server-Sent Events."), **ERRORS},
)
async def create_completion(
    data: CompletionRequest, request: Request[Any, Any, Any], supervisor: Supervisor, settings: Settings
) -> Response[Any]:
    job = completion_job(data, f"cmpl-{secrets.token_hex(16)}", max_keep_alive=settings.max_keep_alive)
    head = answer_head(job)
    if not data.stream:
        return Response(completion(head, await _collect(request, supervisor, job)))
    chunks = ChunkStream.of_completion(head, include_usage=_wants_usage(data))
    return stream_answer(generate(supervisor, job), chunks, settings)


@get("/models")
async def list_models(models: ModelStore) -> ModelList:
    """Every installed model; one that is not in memory is loaded when a request names it."""
    return ModelList(data=tuple(_card(model) for model in await asyncio.to_thread(models.list)))


@get("/models/{model_name:path}")
async def get_model(model_name: str, models: ModelStore) -> ModelCard:
    return _card(await asyncio.to_thread(models.find, model_name.removeprefix("/")))


def _wants_usage(data: ChatRequest | CompletionRequest) -> bool:
    return bool(data.stream_options and data.stream_options.include_usage)


def _card(model: InstalledModel) -> ModelCard:
    return ModelCard(id=model.name, created=int(model.modified_at), owned_by=model.source)


async def _collect(
    request: Request[Any, Any, Any], supervisor: Supervisor, job: GenerateJob
) -> dict[int, list[OutputDelta]]:
    """All deltas by choice; a client that leaves aborts the job."""

    async def run() -> dict[int, list[OutputDelta]]:
        collected: dict[int, list[OutputDelta]] = {}
        async with aclosing(generate(supervisor, job)) as batches:
            async for deltas in batches:
                for delta in deltas:
                    collected.setdefault(delta.index, []).append(delta)
        return collected

    return await unless_disconnected(request.receive, run())


openai_router = Router(
    "/v1",
    route_handlers=[create_chat_completion, create_completion, list_models, get_model],
    tags=["OpenAI"],
)
