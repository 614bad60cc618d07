"""Saved chats and usage → bodies of /api/chats and /api/usage, and messages → what is saved: pure functions.

Called by `app.api.chats`, `app.api.usage` and `app.cli.local_records`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from app.schema.chats import (
    ChatDetails,
    ChatEntry,
    ChatMessageEntry,
    ImportedChatBody,
    ImportedMessage,
    ModelUsageEntry,
    SearchHitEntry,
    TurnEntry,
)
from app.translate.admin import rfc3339
from store.chats.imports import ImportedChat
from store.chats.records import Chat, Message, Part, StoredMessage, Turn
from store.chats.search import SearchHit
from store.errors import InvalidName
from store.models import InstalledModel
from store.names import RepoId
from store.usage_db import ModelUsage, length_advice


def saved_message(message: Mapping[str, Any]) -> Message:
    """The role/content dict of a chat template as a message of the tree; other keys are kept beside the text."""
    others = {key: value for key, value in message.items() if key not in ("role", "content")}
    return Message(message["role"], (Part("text", message["content"], others or None),))


def imported_chat(body: ImportedChatBody) -> ImportedChat:
    branches = tuple(tuple(Message.of_text(one.role, one.content) for one in branch) for branch in body.branches)
    return ImportedChat(title=body.title, model=body.model, created_at=body.created_at, branches=branches)


def import_body(chat: ImportedChat) -> ImportedChatBody:
    """The other direction, for a client."""
    branches = tuple(
        tuple(ImportedMessage(message.role, message.text) for message in branch)  # type: ignore[arg-type]
        for branch in chat.branches
    )
    return ImportedChatBody(chat.model, branches, chat.title, chat.created_at)


def model_revision(installed: InstalledModel) -> str:
    """`org/name@commit` of a model in a cache of the Hugging Face layout, else its name."""
    parts = installed.path.parts
    for repo, folder, commit in zip(parts, parts[1:], parts[2:], strict=False):
        if folder == "snapshots":
            with suppress(InvalidName):
                return f"{RepoId.of_folder(repo)}@{commit}"
    return installed.name


def chat_entry(chat: Chat) -> ChatEntry:
    return ChatEntry(
        id=chat.id,
        title=chat.title,
        model=chat.model,
        tip=chat.tip,
        created_at=rfc3339(chat.created_at),
        updated_at=rfc3339(chat.updated_at),
    )


def chat_details(chat: Chat, messages: Sequence[StoredMessage], turns: Sequence[Turn]) -> ChatDetails:
    return ChatDetails(chat_entry(chat), tuple(map(_message_entry, messages)), tuple(map(_turn_entry, turns)))


def search_hit_entry(hit: SearchHit) -> SearchHitEntry:
    return SearchHitEntry(chat=chat_entry(hit.chat), role=hit.role, message=hit.message, snippet=hit.snippet)


def usage_entry(usage: ModelUsage) -> ModelUsageEntry:
    return ModelUsageEntry(
        model=usage.model,
        requests=usage.num_requests,
        prompt_p50=usage.prompt_p50,
        prompt_p99=usage.prompt_p99,
        prompt_max=usage.prompt_max,
        output_p50=usage.output_p50,
        output_p99=usage.output_p99,
        output_max=usage.output_max,
        needed_model_len=usage.needed_model_len,
        max_model_len=usage.max_model_len,
        advice=length_advice(usage),
        last_used_at=rfc3339(usage.last_used_at),
        max_at_once=usage.max_at_once,
    )


def _message_entry(stored: StoredMessage) -> ChatMessageEntry:
    return ChatMessageEntry(
        hash=stored.hash,
        parent=stored.parent,
        role=stored.message.role,
        content=stored.message.text,
        created_at=rfc3339(stored.created_at),
    )


def _turn_entry(turn: Turn) -> TurnEntry:
    return TurnEntry(
        parent=turn.parent,
        message=turn.tip,
        model=turn.model,
        params=turn.params,
        status=turn.status,
        partial=turn.partial,
        started_at=rfc3339(turn.started_at),
        **msgspec.structs.asdict(turn.numbers),
    )
