"""`ChatsClient`: the part of the daemon's HTTP API that is about saved chats, as typed async methods.

It is `QuireClient.chats`, and uses that client's connection and errors.  Used by `app.cli` and `tui`.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from app.schema.chats import (
    ChatDetails,
    ChatEntry,
    ChatList,
    ImportAnswer,
    ImportedChatBody,
    SearchHitEntry,
    SearchHits,
)

ExportFormat = Literal["markdown", "jsonl"]

T = TypeVar("T")


class Transport(Protocol):
    """How a request reaches the daemon; both methods raise `ClientError`."""

    async def request(self, method: str, path: str, shape: type[T], body: dict[str, Any] | None = None) -> T: ...

    async def request_text(self, path: str) -> str: ...


class ChatsClient:
    """Each method raises `ClientError`; an id may be cut to as much of its beginning as no other chat shares."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self, *, model: str | None = None, limit: int = 100) -> tuple[ChatEntry, ...]:
        """The saved chats, the latest first; with `model` only those with that model."""
        query = urlencode({"limit": limit} | ({"model": model} if model else {}))
        return (await self._transport.request("GET", f"/api/chats?{query}", ChatList)).chats

    async def search(self, words: str, *, limit: int = 20) -> tuple[SearchHitEntry, ...]:
        """The chats that hold all words, the best first."""
        query = urlencode({"q": words, "limit": limit})
        return (await self._transport.request("GET", f"/api/chats/search?{query}", SearchHits)).hits

    async def get(self, chat_id: str) -> ChatDetails:
        """A chat with its messages and turns."""
        return await self._transport.request("GET", _path(chat_id), ChatDetails)

    async def create(self, model: str) -> ChatEntry:
        """A new chat, whose id `QuireClient.chat` takes; the code is "chats_off" where nothing is to be saved."""
        return await self._transport.request("POST", "/api/chats", ChatEntry, {"model": model})

    async def add(self, chat: ImportedChatBody) -> ImportAnswer:
        """Save a chat from another program, unless it is there already."""
        return await self._transport.request("POST", "/api/chats/import", ImportAnswer, msgspec.to_builtins(chat))

    async def rename(self, chat_id: str, title: str) -> ChatEntry:
        return await self._transport.request("PATCH", _path(chat_id), ChatEntry, {"title": title})

    async def delete(self, chat_id: str) -> ChatEntry:
        return await self._transport.request("DELETE", _path(chat_id), ChatEntry)

    async def export(self, chat_id: str, file_format: ExportFormat) -> str:
        """The text of a file that holds the chat."""
        return await self._transport.request_text(f"{_path(chat_id)}/export?{urlencode({'format': file_format})}")


def turns_path(chat_id: str) -> str:
    """Where a conversation is sent to be answered and saved."""
    return f"{_path(chat_id)}/turns"


def _path(chat_id: str) -> str:
    return f"/api/chats/{quote(chat_id, safe='')}"
