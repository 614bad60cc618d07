"""Where the commands about chats and usage get them: from the running daemon, else from the database itself.

Both answer in the bodies of the daemon's routes.  Used by `app.cli.chats` and `app.cli.usage`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from app.cli.connection import find_client

if TYPE_CHECKING:
    from app.chats_client import ExportFormat
    from app.schema.chats import ChatDetails, ChatEntry, ImportAnswer, ImportedChatBody, ModelUsageEntry, SearchHitEntry
    from app.settings import Settings


class ChatRecords(Protocol):
    """What `app.chats_client.ChatsClient` and `LocalChats` share; a chat that is not there is an error."""

    async def list(self, *, model: str | None = None, limit: int = 100) -> tuple[ChatEntry, ...]: ...

    async def search(self, words: str, *, limit: int = 20) -> tuple[SearchHitEntry, ...]: ...

    async def get(self, chat_id: str) -> ChatDetails: ...

    async def add(self, chat: ImportedChatBody) -> ImportAnswer: ...

    async def rename(self, chat_id: str, title: str) -> ChatEntry: ...

    async def delete(self, chat_id: str) -> ChatEntry: ...

    async def export(self, chat_id: str, file_format: ExportFormat) -> str: ...


class Records(Protocol):
    """What `app.client.QuireClient` and `LocalRecords` share."""

    @property
    def chats(self) -> ChatRecords: ...

    async def usage(self) -> tuple[ModelUsageEntry, ...]: ...


@asynccontextmanager
async def open_records(settings: Settings) -> AsyncIterator[Records]:
    """The daemon's records, or this user's database if no daemon runs.  Raises DatabaseUnusable."""
    client = find_client(settings)
    if client is not None:
        async with client:
            yield client
        return
    from store.database import open_database
    from store.paths import user_paths

    connection = open_database(user_paths().database)
    try:
        yield LocalRecords(connection)
    finally:
        connection.close()


class LocalRecords:
    """Chats and usage from the database, without a daemon."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.chats = LocalChats(connection)

    async def usage(self) -> tuple[ModelUsageEntry, ...]:
        from app.translate.chats import usage_entry
        from store.usage_db import UsageDb

        return tuple(map(usage_entry, UsageDb(self._connection).models()))


class LocalChats:
    """Chats from the database, without a daemon."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        from store.chats.tree import ChatsDb

        self._connection = connection
        self._chats = ChatsDb(connection)

    async def list(self, *, model: str | None = None, limit: int = 100) -> tuple[ChatEntry, ...]:
        from app.translate.chats import chat_entry

        return tuple(map(chat_entry, self._chats.chats(limit=limit, model=model)))

    async def search(self, words: str, *, limit: int = 20) -> tuple[SearchHitEntry, ...]:
        from app.translate.chats import search_hit_entry
        from store.chats.search import search_chats

        return tuple(map(search_hit_entry, search_chats(self._connection, words, limit=limit)))

    async def get(self, chat_id: str) -> ChatDetails:
        from app.translate.chats import chat_details

        chat = self._chats.chat(chat_id)
        return chat_details(chat, self._chats.messages(chat.id), self._chats.turns(chat.id))

    async def add(self, chat: ImportedChatBody) -> ImportAnswer:
        from app.schema.chats import ImportAnswer
        from app.translate.chats import chat_entry, imported_chat

        added, is_new = self._chats.add(imported_chat(chat))
        return ImportAnswer(chat_entry(added), is_new)

    async def rename(self, chat_id: str, title: str) -> ChatEntry:
        from app.translate.chats import chat_entry

        return chat_entry(self._chats.rename(chat_id, title))

    async def delete(self, chat_id: str) -> ChatEntry:
        from app.translate.chats import chat_entry

        return chat_entry(self._chats.delete(chat_id))

    async def export(self, chat_id: str, file_format: ExportFormat) -> str:
        from store.chats.export import as_json_lines, as_markdown

        chat = self._chats.chat(chat_id)
        export = as_markdown if file_format == "markdown" else as_json_lines
        return export(chat, self._chats.messages(chat.id), self._chats.turns(chat.id))
