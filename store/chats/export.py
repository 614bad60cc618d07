"""Saved chats as files for other programs: Markdown with YAML front matter, and lines of JSON.

Both hold one branch, the one that the chat shows.  Pure functions; called by `app.chats` and by
`quire chats export`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from store.chats.records import Chat, StoredMessage, Turn

_HEADINGS = {"system": "System", "user": "You", "tool": "Tool"}


def as_markdown(chat: Chat, messages: Sequence[StoredMessage], turns: Sequence[Turn]) -> str:
    """The conversation with a heading per message; an answer's heading is the model that gave it."""
    answers = _answers(turns)
    front = {
        "title": chat.title,
        "id": chat.id,
        "model": chat.model,
        "created": _iso(chat.created_at),
        "updated": _iso(chat.updated_at),
    }
    # A JSON string is a YAML string, whatever it contains.
    lines = ["---", *(f"{key}: {_json(value)}" for key, value in front.items()), "---"]
    for stored in messages:
        turn = answers.get(stored.hash)
        heading = _HEADINGS.get(stored.message.role) or (turn.model if turn else "Assistant")
        lines += ["", f"## {heading}", "", stored.message.text]
        if turn is not None and turn.status != "done":
            lines += ["", f"*({turn.status} before its end)*"]
    return "\n".join(lines) + "\n"


def as_json_lines(chat: Chat, messages: Sequence[StoredMessage], turns: Sequence[Turn]) -> str:
    """One object per message, as chat APIs name things; answers bring what is known of their making."""
    answers = _answers(turns)
    lines = []
    for stored in messages:
        record: dict[str, Any] = {
            "chat": chat.id,
            "hash": stored.hash,
            "parent": stored.parent,
            "role": stored.message.role,
            "content": stored.message.text,
            "created_at": _iso(stored.created_at),
        }
        others = [part for part in stored.message.parts if part.type != "text" or part.payload is not None]
        if others:
            record["parts"] = stored.message.parts
        if turn := answers.get(stored.hash):
            numbers = {key: value for key, value in msgspec.structs.asdict(turn.numbers).items() if value is not None}
            record |= {"model": turn.model, "params": turn.params, "status": turn.status, **numbers}
        lines.append(_json(record) + "\n")
    return "".join(lines)


def _answers(turns: Sequence[Turn]) -> dict[str, Turn]:
    """Turns by the message that they made; where several made the same one, the latest."""
    return {turn.tip: turn for turn in turns if turn.tip is not None}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")
