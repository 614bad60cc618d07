"""`SavedChat`: under which id the conversation on the screen is saved, and what happens when it cannot be.

A conversation gets an id with its first prompt; the daemon then saves both sides while they come.
Talking goes on when saving does not.  The chat screen owns one.
"""

from __future__ import annotations

from typing import Protocol

from app.client import ClientError
from app.schema.chats import ChatDetails, ChatEntry


class ChatRecords(Protocol):
    """The part of `app.chats_client.ChatsClient` that a chat needs."""

    async def list(self) -> tuple[ChatEntry, ...]: ...

    async def get(self, chat_id: str) -> ChatDetails: ...

    async def create(self, model: str) -> ChatEntry: ...


class SavedChat:
    """One conversation's place among the saved chats."""

    def __init__(self, records: ChatRecords, model: str) -> None:
        self._records = records
        self._model = model
        self._chat_id: str | None = None
        self._is_on = True

    def resume(self, chat_id: str) -> None:
        """What is said next belongs to this chat."""
        self._chat_id = chat_id

    def begin_anew(self) -> None:
        """What is said next belongs to a new chat."""
        self._chat_id = None

    async def id(self) -> str | None:
        """The chat to send the next turn to; None where nothing is saved.  Raises `ClientError`."""
        if self._chat_id is None and self._is_on:
            self._chat_id = (await self._records.create(self._model)).id
        return self._chat_id

    def explain(self, error: ClientError) -> str | None:
        """What to tell of an error that only keeps the conversation from being saved: "" is nothing.

        None for any other error.  After this, `id` does not fail in the same way again.
        """
        match error.code:
            case "chats_off":
                self._stop()
                return ""
            case "chat_not_found":
                # A later turn brings the whole conversation along, into a new chat.
                self._chat_id = None
                return "This chat was deleted meanwhile; what you say next makes a new one of it."
            case "database_unusable" | "not_found":
                self._stop()
                return f"This conversation is not saved: {error.message}"
        return None

    def _stop(self) -> None:
        self._chat_id = None
        self._is_on = False
