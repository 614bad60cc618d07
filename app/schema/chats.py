"""Bodies of /api/chats and /api/usage.  msgspec structs, no behaviour.

Times of day are RFC 3339, durations in seconds, lengths in tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

_MAX_TIME_S = 253_402_300_799.0
"""The last second of the year 9999, after which dates cannot be written."""


class NewChat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /api/chats; without a title the first question gives it."""

    model: str
    title: str = ""


class ImportedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class ImportedChatBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /api/chats/import: each branch is a whole conversation, the last one is shown.

    `created_at` is in seconds since the epoch, as other programs write it.
    """

    model: str
    branches: Annotated[
        tuple[Annotated[tuple[ImportedMessage, ...], msgspec.Meta(min_length=1)], ...], msgspec.Meta(min_length=1)
    ]
    title: str = ""
    created_at: Annotated[float, msgspec.Meta(ge=0, le=_MAX_TIME_S)] | None = None


class ChatTitle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of PATCH /api/chats/ID."""

    title: str


class ForkPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /api/chats/ID/fork: the hash of the last message to share; None shares all."""

    message: str | None = None


class ChatEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`tip` is the hash of the newest message of the branch that the chat shows, None in an empty chat."""

    id: str
    title: str
    model: str
    tip: str | None
    created_at: str
    updated_at: str


class ImportAnswer(msgspec.Struct, frozen=True):
    """`is_new` is false for a chat that was saved before, which stays as it was."""

    chat: ChatEntry
    is_new: bool


class ChatList(msgspec.Struct, frozen=True):
    chats: tuple[ChatEntry, ...]


class ChatMessageEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`hash` stands for the whole conversation up to this message; `parent` is the one before it."""

    hash: str
    parent: str | None
    role: str
    content: str
    created_at: str


class TurnEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One answer; `status` is streaming, done, cancelled or error, `partial` the text of one that runs.

    `parent` is the message that was answered, `message` the answer, None while there is none.
    """

    parent: str
    message: str | None
    model: str
    params: dict[str, Any]
    status: str
    partial: str
    started_at: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    time_to_first_token_s: float | None = None
    tokens_per_s: float | None = None
    duration_s: float | None = None


class ChatDetails(msgspec.Struct, frozen=True):
    """`messages` is one branch from its beginning; `turns` are the answers of all branches."""

    chat: ChatEntry
    messages: tuple[ChatMessageEntry, ...]
    turns: tuple[TurnEntry, ...]


class SearchHitEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The best match of a chat: the role and hash of the message, or the role "title" and no hash."""

    chat: ChatEntry
    role: str
    message: str | None
    snippet: str


class SearchHits(msgspec.Struct, frozen=True):
    hits: tuple[SearchHitEntry, ...]


class ModelUsageEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of one model's requests; percentiles are at most 4.5 % above the true ones.

    `needed_model_len` is P99 of the prompts plus the longest answer, `max_model_len` what the model was
    last served with, and `advice` what follows from the two, for people.  `max_at_once` is the most sequences that
    were open together.
    """

    model: str
    requests: int
    prompt_p50: int
    prompt_p99: int
    prompt_max: int
    output_p50: int
    output_p99: int
    output_max: int
    needed_model_len: int
    max_model_len: int
    advice: str
    last_used_at: str
    max_at_once: int = 0


class UsageReport(msgspec.Struct, frozen=True):
    models: tuple[ModelUsageEntry, ...]
