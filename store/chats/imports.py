"""Reads chats of other programs: the conversations.json of a ChatGPT export, and Quire's own lines of JSON.

Only texts of user, assistant and system are taken; whatever else a message holds is skipped, and what
comes after it kept.  Pure apart from reading the file; called by `quire chats import`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from store.chats.records import Message
from store.errors import UnsupportedFormat

_ROLES = ("system", "user", "assistant")
_UNKNOWN_MODEL = "unknown"
_MAX_TIME_S = 253_402_300_799.0
"""The last second of the year 9999, after which dates cannot be written."""


class ImportedChat(msgspec.Struct, frozen=True, kw_only=True):
    """A chat from elsewhere: each branch is a whole conversation, the last one is shown.

    `created_at` is in seconds since the epoch, None where the file does not say.
    """

    title: str
    model: str
    created_at: float | None
    branches: tuple[tuple[Message, ...], ...]


class _Author(msgspec.Struct):
    role: str = ""


class _Content(msgspec.Struct):
    parts: list[Any] = []


class _Metadata(msgspec.Struct):
    model_slug: str | None = None


class _NodeMessage(msgspec.Struct):
    author: _Author = msgspec.field(default_factory=_Author)
    content: _Content = msgspec.field(default_factory=_Content)
    metadata: _Metadata | None = None


class _Node(msgspec.Struct):
    message: _NodeMessage | None = None
    parent: str | None = None


class _Conversation(msgspec.Struct):
    mapping: dict[str, _Node]
    title: str | None = None
    create_time: float | None = None
    current_node: str | None = None


class _Line(msgspec.Struct):
    chat: str
    role: str
    content: str
    model: str | None = None


def read_chats(path: Path) -> list[ImportedChat]:
    """The chats in a file, without empty ones.  Raises UnsupportedFormat, and OSError where it cannot be read."""
    content = path.read_bytes()
    try:
        if content.lstrip()[:1] == b"[":
            conversations = msgspec.json.decode(content, type=list[_Conversation])
            chats = [_from_chatgpt(conversation) for conversation in conversations]
        else:
            chats = _from_lines(msgspec.json.Decoder(_Line).decode_lines(content))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnsupportedFormat(
            f"{path} holds no chats that can be read ({error}); give the conversations.json of a ChatGPT export, "
            "or a file of `quire chats export --format jsonl`."
        ) from error
    return [chat for chat in chats if chat.branches]


def _from_chatgpt(conversation: _Conversation) -> ImportedChat:
    """All branches of the tree; the current one last, unless it is part of another."""
    nodes = conversation.mapping
    parents = {node.parent for node in nodes.values()}
    tips = [tip for tip in nodes if tip not in parents]
    if conversation.current_node in nodes:
        tips = [*(tip for tip in tips if tip != conversation.current_node), conversation.current_node]
    branches = dict.fromkeys(tuple(_texts(nodes, tip)) for tip in tips)
    time_s = conversation.create_time
    slugs = (node.message.metadata.model_slug for node in nodes.values() if node.message and node.message.metadata)
    return ImportedChat(
        title=conversation.title or "",
        model=next((slug for slug in slugs if slug), _UNKNOWN_MODEL),
        created_at=time_s if time_s is not None and 0 <= time_s <= _MAX_TIME_S else None,
        branches=tuple(branch for branch in branches if branch),
    )


def _texts(nodes: Mapping[str, _Node], tip: str) -> list[Message]:
    """The messages with a text from the root to `tip`; a parent that is missing or comes again ends the way up."""
    messages: list[Message] = []
    seen: set[str] = set()
    name: str | None = tip
    while name is not None and name in nodes and name not in seen:
        seen.add(name)
        node = nodes[name]
        if node.message is not None and node.message.author.role in _ROLES:
            text = "\n".join(part for part in node.message.content.parts if isinstance(part, str)).strip()
            if text:
                messages.append(Message.of_text(node.message.author.role, text))
        name = node.parent
    return messages[::-1]


def _from_lines(lines: list[_Line]) -> list[ImportedChat]:
    chats: dict[str, list[_Line]] = {}
    for line in lines:
        chats.setdefault(line.chat, []).append(line)
    return [_from_export(chat_lines) for chat_lines in chats.values()]


def _from_export(lines: list[_Line]) -> ImportedChat:
    branch = tuple(Message.of_text(line.role, line.content) for line in lines if line.role in _ROLES and line.content)
    model = next((line.model for line in lines if line.model), _UNKNOWN_MODEL)
    return ImportedChat(title="", model=model, created_at=None, branches=(branch,) if branch else ())
