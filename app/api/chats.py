"""Saved chats: /api/chats.

A program keeps a chat by sending its conversation to `POST /api/chats/ID/turns` instead of
/v1/chat/completions: same body, same stream, and both sides are saved while they come.  Everything that
touches the database runs on its one thread.  Translation is in `app.translate.chats`.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from typing import Annotated, Literal

from litestar import Response, Router, delete, get, patch, post
from litestar.openapi import ResponseSpec
from litestar.params import Parameter

from app.api.body import JsonBody
from app.api.openai_stream import ChunkStream, answer_head, stream_answer
from app.api.streaming import EventStream
from app.chat_recorder import Question, TurnRecorder
from app.errors import BadRequest, ChatsOff
from app.generation import generate
from app.residency.supervisor import Supervisor
from app.schema.chats import (
    ChatDetails,
    ChatEntry,
    ChatList,
    ChatTitle,
    ForkPoint,
    ImportAnswer,
    ImportedChatBody,
    NewChat,
    SearchHits,
)
from app.schema.error import ErrorBody
from app.schema.openai import ChatChunk, ChatRequest
from app.settings import Settings
from app.translate.chats import chat_details, chat_entry, imported_chat, model_revision, saved_message, search_hit_entry
from app.translate.openai import chat_job
from store.chats.export import as_json_lines, as_markdown
from store.chats.search import search_chats
from store.chats.tree import ChatsDb
from store.database import DatabaseThread
from store.errors import StoreError
from store.models import ModelStore

MAX_LISTED = 1000

ERRORS = {
    404: ResponseSpec(ErrorBody, description="No chat has this id."),
    409: ResponseSpec(ErrorBody, description="Chats are not saved: save_chats is false."),
}


@get("/")
async def list_chats(
    database: DatabaseThread, models: ModelStore, model: str | None = None, limit: int = 100
) -> ChatList:
    """The saved chats, the latest first; `model` shows only those with that model."""
    limit = _checked_limit(limit)
    name = None if model is None else (await _name_and_revision(models, model))[0]
    chats = await database.run(lambda connection: ChatsDb(connection).chats(limit=limit, model=name))
    return ChatList(tuple(map(chat_entry, chats)))


@post("/", dto=JsonBody, status_code=201, responses=ERRORS)
async def create_chat(data: NewChat, database: DatabaseThread, models: ModelStore, settings: Settings) -> ChatEntry:
    """An empty chat, to send turns to; one that gets none is forgotten at the daemon's next start."""
    _check_is_on(settings)
    model, _ = await _name_and_revision(models, data.model)
    return chat_entry(await database.run(lambda connection: ChatsDb(connection).create(model, data.title)))


@post("/import", dto=JsonBody, status_code=200, responses=ERRORS)
async def import_chat(data: ImportedChatBody, database: DatabaseThread, settings: Settings) -> ImportAnswer:
    """Save a chat from another program; sending it again changes nothing."""
    _check_is_on(settings)
    chat, is_new = await database.run(lambda connection: ChatsDb(connection).add(imported_chat(data)))
    return ImportAnswer(chat_entry(chat), is_new)


@get("/search")
async def search(database: DatabaseThread, q: str, limit: int = 20) -> SearchHits:
    """Chats of which a message or the title holds all words of `q`; "quotes" keep words together."""
    limit = _checked_limit(limit)
    hits = await database.run(lambda connection: search_chats(connection, q, limit=limit))
    return SearchHits(tuple(map(search_hit_entry, hits)))


@get("/{chat_id:str}", responses=ERRORS)
async def get_chat(chat_id: str, database: DatabaseThread, tip: str | None = None) -> ChatDetails:
    """A chat with the branch that ends in the message `tip`, by default its newest; the beginning of an id will do."""

    def read(connection: sqlite3.Connection) -> ChatDetails:
        chats = ChatsDb(connection)
        chat = chats.chat(chat_id)
        return chat_details(chat, chats.messages(chat.id, tip), chats.turns(chat.id))

    return await database.run(read)


@patch("/{chat_id:str}", dto=JsonBody, responses=ERRORS)
async def rename_chat(chat_id: str, data: ChatTitle, database: DatabaseThread) -> ChatEntry:
    return chat_entry(await database.run(lambda connection: ChatsDb(connection).rename(chat_id, data.title)))


@delete("/{chat_id:str}", status_code=200, responses=ERRORS)
async def delete_chat(chat_id: str, database: DatabaseThread) -> ChatEntry:
    """Delete a chat; messages that other chats share stay in those."""
    return chat_entry(await database.run(lambda connection: ChatsDb(connection).delete(chat_id)))


@post("/{chat_id:str}/fork", dto=JsonBody, status_code=201, responses=ERRORS)
async def fork_chat(chat_id: str, data: ForkPoint, database: DatabaseThread) -> ChatEntry:
    """A new chat that shares the messages of this one up to a point."""
    return chat_entry(await database.run(lambda connection: ChatsDb(connection).fork(chat_id, data.message)))


@get("/{chat_id:str}/export", responses=ERRORS)
async def export_chat(
    chat_id: str,
    database: DatabaseThread,
    file_format: Annotated[Literal["markdown", "jsonl"], Parameter(query="format")] = "markdown",
) -> Response[str]:
    """A chat as Markdown with YAML front matter, or as lines of JSON."""

    def write(connection: sqlite3.Connection) -> str:
        chats = ChatsDb(connection)
        chat = chats.chat(chat_id)
        export = as_markdown if file_format == "markdown" else as_json_lines
        return export(chat, chats.messages(chat.id), chats.turns(chat.id))

    media_type = "text/markdown; charset=utf-8" if file_format == "markdown" else "application/x-ndjson"
    return Response(await database.run(write), media_type=media_type)


@post(
    "/{chat_id:str}/turns",
    dto=JsonBody,
    status_code=200,
    responses={200: ResponseSpec(ChatChunk, description="Server-Sent Events."), **ERRORS},
)
async def create_turn(
    chat_id: str,
    data: ChatRequest,
    database: DatabaseThread,
    models: ModelStore,
    supervisor: Supervisor,
    settings: Settings,
) -> EventStream:
    """Answer a conversation as /v1/chat/completions does with stream: true, and save it."""
    _check_is_on(settings)
    if not data.stream:
        raise BadRequest("stream must be true here; /v1/chat/completions answers in one piece.", param="stream")
    if data.n not in (None, 1):
        raise BadRequest("n must be 1 here: a saved turn has one answer.", param="n")
    job = chat_job(data, f"chatcmpl-{secrets.token_hex(16)}", max_keep_alive=settings.max_keep_alive)
    messages = job.prompts[0].messages
    assert messages is not None
    name, revision = await _name_and_revision(models, data.model)
    question = Question(chat_id, tuple(map(saved_message, messages)), name, revision, job.overrides)
    include_usage = bool(data.stream_options and data.stream_options.include_usage)
    chunks = ChunkStream.of_chat(answer_head(job), include_usage=include_usage)
    return stream_answer(TurnRecorder(database, question).follow(generate(supervisor, job)), chunks, settings)


def _check_is_on(settings: Settings) -> None:
    if not settings.save_chats:
        origin = settings.origin("save_chats")
        raise ChatsOff(f"Chats are not saved, because save_chats is false ({origin}); set it to true to save them.")


def _checked_limit(limit: int) -> int:
    if not 1 <= limit <= MAX_LISTED:
        raise BadRequest(f"limit must be between 1 and {MAX_LISTED:,}.", param="limit")
    return limit


async def _name_and_revision(models: ModelStore, model: str) -> tuple[str, str]:
    """The installed name of a model, and its repository and commit; as given where it is not installed.

    What was typed is saved before anything else can refuse it, an unknown model included.
    """

    def find() -> tuple[str, str]:
        try:
            installed = models.find(model)
        except StoreError:
            return model, model
        return installed.name, model_revision(installed)

    return await asyncio.to_thread(find)


chats_router = Router(
    "/api/chats",
    route_handlers=[
        list_chats,
        create_chat,
        import_chat,
        search,
        get_chat,
        rename_chat,
        delete_chat,
        fork_chat,
        export_chat,
        create_turn,
    ],
    tags=["Chats"],
)
