"""What a saved chat consists of: messages and their hashes, chats, turns.

Plain values without a database; `store.chats.tree` keeps them, `store.chats.export` writes them out, `app`
shows them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_TIME_CHARACTERS = 9
_RANDOM_CHARACTERS = 7
_MAX_TITLE_CHARS = 60

TurnStatus = Literal["streaming", "done", "cancelled", "error"]
EndStatus = Literal["done", "cancelled", "error"]


class Part(msgspec.Struct, frozen=True):
    """A piece of a message: `type` is "text", "reasoning", "tool_call", "tool_result" or "image".

    `payload` is what a text cannot say: the arguments of a call, the content id of an image.
    """

    type: str
    text: str = ""
    payload: Mapping[str, Any] | None = None


class Message(msgspec.Struct, frozen=True):
    """One message; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    parts: tuple[Part, ...]

    @classmethod
    def of_text(cls, role: str, text: str) -> Message:
        return cls(role, (Part("text", text),))

    @property
    def text(self) -> str:
        """What the message says, without reasoning and tool calls."""
        return "\n".join(part.text for part in self.parts if part.type == "text")


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message and its place in the tree; `created_at` is in seconds since the epoch."""

    hash: str
    parent: str | None
    message: Message
    created_at: float


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the list of chats; `tip` is its newest message, None before the first one."""

    id: str
    title: str
    model: str
    tip: str | None
    created_at: float
    updated_at: float


class TurnNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer took: tokens, seconds, and tokens per second after the first; None where unknown."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    time_to_first_token_s: float | None = None
    tokens_per_s: float | None = None
    duration_s: float | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: to the message `parent`, and itself the message `tip`, None while there is none.

    `model` is the repository and commit that answered; `partial` is the text of an answer that runs.
    """

    id: int
    parent: str
    tip: str | None
    model: str
    params: dict[str, Any]
    status: TurnStatus
    partial: str
    numbers: TurnNumbers
    started_at: float


def new_chat_id(now: float) -> str:
    """An id that sorts by time: milliseconds since the epoch, then 35 random bits, in Crockford's base 32."""
    number = int(now * 1000) << (5 * _RANDOM_CHARACTERS) | secrets.randbits(5 * _RANDOM_CHARACTERS)
    digits = (number >> shift & 31 for shift in range(5 * (_TIME_CHARACTERS + _RANDOM_CHARACTERS - 1), -1, -5))
    return "".join(_ALPHABET[digit] for digit in digits)


def message_hash(message: Message, parent: str | None) -> str:
    """Blake2b, 128 bits, over the canonical JSON of the parent's hash, the role and the parts."""
    parts = [(part.type, part.text, part.payload) for part in message.parts]
    content = msgspec.json.encode([parent, message.role, parts], order="deterministic")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def title_of(messages: Sequence[Message]) -> str:
    """The first line of the first question."""
    texts = (message.text.strip() for message in messages if message.role == "user")
    return clean_title(next((text.splitlines()[0] for text in texts if text), ""))


def clean_title(text: str) -> str:
    """One line that a list can show: nothing that would move a cursor, and not too long."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= _MAX_TITLE_CHARS else line[: _MAX_TITLE_CHARS - 1].rstrip() + "…"
