"""Full-text search over saved chats that also works for languages without spaces.

The index holds trigrams, which find any substring of three characters or more; shorter terms, which in
Chinese are most words, are looked for in the texts themselves.  What a person types is never read as
query syntax.  Called by `app.chats` and by `quire chats search`.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence

import msgspec

from store.chats.records import Chat

_MIN_INDEXED_CHARS = 3
_SNIPPET_CHARS_BEFORE = 30
_SNIPPET_CHARS = 120

_TERM = re.compile(r'"(?P<phrase>[^"]*)"|(?P<word>\S+)')
_CHAT_COLUMNS = "t.id, t.title, t.model, t.tip, t.created_at, t.updated_at"


class SearchHit(msgspec.Struct, frozen=True, kw_only=True):
    """The best match within one chat; `role` is "title" when it is the title that matches."""

    chat: Chat
    role: str
    message: str | None
    snippet: str


def search_chats(connection: sqlite3.Connection, query: str, *, limit: int = 20) -> list[SearchHit]:
    """Chats of which one message, or the title, holds all terms of `query`; the best first, then the latest.

    A term is a word or a "quoted phrase"; case does not matter.  System messages are not searched.
    """
    terms = search_terms(query)
    if not terms:
        return []
    hits = {hit.chat.id: hit for hit in _matching_titles(connection, terms, limit)}
    for hit in _matching_messages(connection, terms, limit):
        hits.setdefault(hit.chat.id, hit)
    return list(hits.values())[:limit]


def search_terms(query: str) -> list[str]:
    """`'weather "big cat"'` → weather, big cat."""
    found = (match["phrase"] if match["word"] is None else match["word"] for match in _TERM.finditer(query))
    # Without NUL, which would end a text for SQLite, and halves of characters, which have no encoding.
    cleaned = (raw.replace("\0", "").encode("utf-8", "ignore").decode() for raw in found)
    return [term for text in cleaned if (term := text.strip())]


def snippet(text: str, terms: Sequence[str]) -> str:
    """The part of `text` around the first term that it holds, on one line."""
    # Lower case may be longer than the text it stands for, so that positions in it would be wrong.
    found = (re.search(re.escape(term), text, re.IGNORECASE) for term in terms)
    start = max(0, min((match.start() for match in found if match), default=0) - _SNIPPET_CHARS_BEFORE)
    end = min(len(text), start + _SNIPPET_CHARS)
    line = " ".join(text[start:end].split())
    return f"{'…' if start else ''}{line}{'…' if end < len(text) else ''}"


def _matching_titles(connection: sqlite3.Connection, terms: Sequence[str], limit: int) -> list[SearchHit]:
    condition = " AND ".join([_contains("t.title")] * len(terms))
    rows = connection.execute(
        f"SELECT {_CHAT_COLUMNS} FROM threads t WHERE t.tip IS NOT NULL AND {condition} "
        "ORDER BY t.updated_at DESC LIMIT ?",
        (*map(_like_pattern, terms), limit),
    )
    chats = [_chat(row) for row in rows]
    return [SearchHit(chat=chat, role="title", message=None, snippet=snippet(chat.title, terms)) for chat in chats]


def _matching_messages(connection: sqlite3.Connection, terms: Sequence[str], limit: int) -> list[SearchHit]:
    indexed = [term for term in terms if len(term) >= _MIN_INDEXED_CHARS]
    short = [term for term in terms if len(term) < _MIN_INDEXED_CHARS]
    # Without an indexed term nothing ranks the texts, and the newest come first.
    ranked = "SELECT rowid AS id, rank FROM parts_fts WHERE parts_fts MATCH ?"
    found = ranked if indexed else "SELECT id, -id AS rank FROM parts"
    conditions = ["p.type = 'text'", "m.role != 'system'", *[_contains("p.text")] * len(short)]
    rows = connection.execute(
        # Beside min(), SQLite takes the other columns from the row that holds the minimum.
        f"WITH found AS MATERIALIZED ({found}) "
        f"SELECT {_CHAT_COLUMNS}, m.role, m.hash, p.text, min(found.rank) AS best FROM found "
        "JOIN parts p ON p.id = found.id JOIN messages m ON m.hash = p.message "
        "JOIN thread_messages member ON member.message = m.hash JOIN threads t ON t.id = member.thread "
        f"WHERE {' AND '.join(conditions)} GROUP BY t.id ORDER BY best, t.updated_at DESC LIMIT ?",
        (*([_match_query(indexed)] if indexed else []), *map(_like_pattern, short), limit),
    )
    return [SearchHit(chat=_chat(row[:6]), role=row[6], message=row[7], snippet=snippet(row[8], terms)) for row in rows]


def _match_query(terms: Sequence[str]) -> str:
    """All terms, each as a quoted string of FTS5, in which nothing is an operator."""
    return " AND ".join('"' + term.replace('"', '""') + '"' for term in terms)


def _contains(column: str) -> str:
    return f"{column} LIKE ? ESCAPE '\\'"


def _like_pattern(term: str) -> str:
    return "%" + re.sub(r"([\\%_])", r"\\\1", term) + "%"


def _chat(row: tuple[str, str, str, str, float, float]) -> Chat:
    chat_id, title, model, tip, created_at, updated_at = row
    return Chat(id=chat_id, title=title, model=model, tip=tip, created_at=created_at, updated_at=updated_at)
