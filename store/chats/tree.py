"""`ChatsDb`: saved chats as a content-addressed tree of messages.

A message's hash covers its role, its parts and its parent's hash, so it stands for the whole
conversation up to it: asking again with an edited question, or forking a chat, adds the rows that are
new and shares the others.  A chat (`threads`) points at the newest message of its latest branch; a turn
is one answer with the model, the parameters and the numbers that made it.  The system message is the
root of its tree.  While an answer runs its text is in `turns.partial`; its message is written at the end,
when its content, and so its hash, is known.

Holds a connection of `store.database` and no other state.  Called by `app.chats` in the daemon and by
`quire chats` where no daemon runs; searching is in `store.chats.search`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from store.chats.imports import ImportedChat
from store.chats.records import (
    Chat,
    EndStatus,
    Message,
    Part,
    StoredMessage,
    Turn,
    TurnNumbers,
    clean_title,
    message_hash,
    new_chat_id,
    title_of,
)
from store.database import writing
from store.errors import ChatNotFound


class ChatsDb:
    """The chats of one database; `clock` gives seconds since the epoch."""

    def __init__(self, connection: sqlite3.Connection, *, clock: Callable[[], float] = time.time) -> None:
        self._connection = connection
        self._clock = clock

    def create(self, model: str, title: str = "") -> Chat:
        """A new chat without messages; its title comes from the first question unless given."""
        now = self._clock()
        chat = Chat(
            id=new_chat_id(now), title=clean_title(title), model=model, tip=None, created_at=now, updated_at=now
        )
        with writing(self._connection):
            self._insert_chat(chat)
        return chat

    def fork(self, chat_id: str, at: str | None = None) -> Chat:
        """A new chat that shares the messages of another up to `at`, by default its newest.  Raises ChatNotFound."""
        with writing(self._connection):
            source = self.chat(chat_id)
            tip = at or source.tip
            now = self._clock()
            fork = Chat(
                id=new_chat_id(now), title=source.title, model=source.model, tip=tip, created_at=now, updated_at=now
            )
            path = self._path(source.id, tip)
            self._insert_chat(fork)
            self._add_members(fork.id, [one.hash for one in path])
        return fork

    def add(self, imported: ImportedChat) -> tuple[Chat, bool]:
        """Save a chat from elsewhere, and whether it is new.

        Where a chat holds what this one shows, that chat gets the branches that it lacks, and no more.
        """
        assert imported.branches and all(imported.branches), "a chat that is added has messages"
        now = self._clock()
        created_at = now if imported.created_at is None else imported.created_at
        with writing(self._connection):
            branches = [self._save_messages(branch, created_at) for branch in imported.branches]
            tip = branches[-1][-1]
            known = self._connection.execute(
                "SELECT thread FROM thread_messages WHERE message = ? LIMIT 1", (tip,)
            ).fetchone()
            if known is not None:
                # Its other branches, if they are new, belong to it as well.
                for hashes in branches:
                    self._add_members(known[0], hashes)
                return self.chat(known[0]), False
            chat = Chat(
                id=new_chat_id(now),
                title=clean_title(imported.title) or title_of(imported.branches[-1]),
                model=imported.model,
                tip=tip,
                created_at=created_at,
                updated_at=created_at,
            )
            self._insert_chat(chat)
            for hashes in branches:
                self._add_members(chat.id, hashes)
        return chat, True

    def begin_turn(
        self,
        chat_id: str,
        messages: Sequence[Message],
        model: str,
        params: Mapping[str, Any],
        *,
        revision: str | None = None,
    ) -> int:
        """Save a conversation that awaits its answer, and the turn that will hold it; the turn's id.

        `messages` is the whole conversation, the system message included; what is saved already is shared.
        `revision` says more exactly than `model` what answers.  Raises ChatNotFound.
        """
        assert messages, "a turn answers a message"
        now = self._clock()
        with writing(self._connection):
            chat = self.chat(chat_id)
            hashes = self._save_messages(messages, now)
            self._add_members(chat.id, hashes)
            title = chat.title or title_of(messages)
            self._connection.execute(
                "UPDATE threads SET tip = ?, model = ?, title = ?, updated_at = ? WHERE id = ?",
                (hashes[-1], model, title, now, chat.id),
            )
            cursor = self._connection.execute(
                "INSERT INTO turns (thread, parent, model, params, status, started_at) "
                "VALUES (?, ?, ?, ?, 'streaming', ?)",
                (chat.id, hashes[-1], revision or model, _to_json(params), now),
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def save_partial(self, turn_id: int, text: str) -> None:
        """What the answer says so far; nothing happens to a turn that has ended or whose chat is deleted."""
        with writing(self._connection):
            self._connection.execute(
                "UPDATE turns SET partial = ? WHERE id = ? AND status = 'streaming'", (text, turn_id)
            )

    def finish_turn(
        self,
        turn_id: int,
        status: EndStatus,
        answer: Message | None,
        numbers: TurnNumbers,
    ) -> None:
        """End a turn with what was answered, None for nothing; nothing happens to one that has ended already,
        or whose chat is deleted.
        """
        now = self._clock()
        with writing(self._connection):
            row = self._connection.execute(
                "SELECT thread, parent FROM turns WHERE id = ? AND status = 'streaming'", (turn_id,)
            ).fetchone()
            if row is None:
                return
            thread, parent = row
            tip = None if answer is None else self._save_message(answer, parent, now)
            if tip is not None:
                self._add_members(thread, [tip])
            self._connection.execute(
                "UPDATE turns SET status = ?, tip = ?, partial = '', prompt_tokens = ?, "
                "completion_tokens = ?, time_to_first_token_s = ?, tokens_per_s = ?, duration_s = ? WHERE id = ?",
                (status, tip, *msgspec.structs.astuple(numbers), turn_id),
            )
            # Another question may have been asked in this chat meanwhile; the chat then stays at that one.
            self._connection.execute(
                "UPDATE threads SET tip = coalesce(?, tip), updated_at = ? WHERE id = ? AND tip = ?",
                (tip, now, thread, parent),
            )

    def cancel_leftovers(self) -> int:
        """End the turns that a daemon left behind when it died, with what they had; how many there were.

        Chats that never got a message go.  Only for the one process that runs answers.
        """
        rows = self._connection.execute("SELECT id, partial FROM turns WHERE status = 'streaming'").fetchall()
        for turn_id, partial in rows:
            answer = Message.of_text("assistant", partial) if partial else None
            self.finish_turn(turn_id, "cancelled", answer, TurnNumbers())
        with writing(self._connection):
            self._connection.execute("DELETE FROM threads WHERE tip IS NULL")
        return len(rows)

    def chats(self, *, limit: int = 100, model: str | None = None) -> list[Chat]:
        """Chats that have messages, the latest first."""
        rows = self._connection.execute(
            "SELECT id, title, model, tip, created_at, updated_at FROM threads "
            "WHERE tip IS NOT NULL AND coalesce(?, model) = model ORDER BY updated_at DESC, id DESC LIMIT ?",
            (model, limit),
        )
        return [_chat(row) for row in rows]

    def chat(self, chat_id: str) -> Chat:
        """The chat of that id, or the only one whose id begins so.  Raises ChatNotFound."""
        # Ids are ASCII; other text may not even be UTF-8.
        beginning = chat_id.lower() if chat_id.isascii() else ""
        # A range instead of LIKE, in which `_` and `%` would match anything.
        rows = self._connection.execute(
            "SELECT id, title, model, tip, created_at, updated_at FROM threads "
            "WHERE id >= ? AND id < ? || 'zz' LIMIT 2",
            (beginning, beginning),
        ).fetchall()
        if len(rows) == 1 and beginning and rows[0][0].startswith(beginning):
            return _chat(rows[0])
        if len(rows) > 1 and beginning:
            raise ChatNotFound(f"Several chats begin with {chat_id!r}; give more of the id, as `quire chats` shows it.")
        raise ChatNotFound(f"There is no chat {chat_id!r}; `quire chats` lists those that are saved.")

    def messages(self, chat_id: str, tip: str | None = None) -> list[StoredMessage]:
        """The conversation from its beginning up to `tip`, by default the chat's newest.  Raises ChatNotFound."""
        chat = self.chat(chat_id)
        return self._path(chat.id, tip or chat.tip)

    def turns(self, chat_id: str) -> list[Turn]:
        """Every answer of a chat, on all branches, in the order in which they were asked for."""
        rows = self._connection.execute(
            "SELECT id, parent, tip, model, params, status, partial, started_at, prompt_tokens, completion_tokens, "
            "time_to_first_token_s, tokens_per_s, duration_s FROM turns WHERE thread = ? ORDER BY id",
            (self.chat(chat_id).id,),
        )
        return [_turn(row) for row in rows]

    def rename(self, chat_id: str, title: str) -> Chat:
        """The chat with its new title, which is cut to one short line.  Raises ChatNotFound."""
        with writing(self._connection):
            chat = msgspec.structs.replace(self.chat(chat_id), title=clean_title(title))
            self._connection.execute("UPDATE threads SET title = ? WHERE id = ?", (chat.title, chat.id))
        return chat

    def delete(self, chat_id: str) -> Chat:
        """Delete a chat, and of its messages those that no other chat shares.  Raises ChatNotFound."""
        with writing(self._connection):
            chat = self.chat(chat_id)
            members = self._connection.execute(
                "SELECT message FROM thread_messages WHERE thread = ?", (chat.id,)
            ).fetchall()
            self._connection.execute("DELETE FROM threads WHERE id = ?", (chat.id,))
            # A chat shares whole beginnings, so a message goes only after all that build on it.
            self._connection.execute(
                "DELETE FROM messages WHERE hash IN (SELECT value FROM json_each(?)) "
                "AND hash NOT IN (SELECT message FROM thread_messages)",
                (_to_json([hash_ for (hash_,) in members]),),
            )
        return chat

    def _insert_chat(self, chat: Chat) -> None:
        self._connection.execute(
            "INSERT INTO threads (id, title, model, tip, created_at, updated_at) VALUES (?, ?, ?, ?, ?, ?)",
            msgspec.structs.astuple(chat),
        )

    def _add_members(self, thread: str, hashes: Sequence[str]) -> None:
        self._connection.executemany(
            "INSERT OR IGNORE INTO thread_messages (thread, message) VALUES (?, ?)",
            [(thread, hash_) for hash_ in hashes],
        )

    def _save_messages(self, messages: Sequence[Message], now: float) -> list[str]:
        hashes: list[str] = []
        for message in messages:
            hashes.append(self._save_message(message, hashes[-1] if hashes else None, now))
        return hashes

    def _save_message(self, message: Message, parent: str | None, now: float) -> str:
        hash_ = message_hash(message, parent)
        added = self._connection.execute(
            "INSERT OR IGNORE INTO messages (hash, parent, role, created_at) VALUES (?, ?, ?, ?)",
            (hash_, parent, message.role, now),
        )
        if added.rowcount:
            self._connection.executemany(
                "INSERT INTO parts (message, position, type, text, payload) VALUES (?, ?, ?, ?, ?)",
                [
                    (hash_, i, part.type, part.text, None if part.payload is None else _to_json(part.payload))
                    for i, part in enumerate(message.parts)
                ],
            )
        return hash_

    def _path(self, thread: str, tip: str | None) -> list[StoredMessage]:
        rows = self._connection.execute(
            "WITH RECURSIVE path (hash, parent, role, created_at, depth) AS ("
            "  SELECT m.hash, m.parent, m.role, m.created_at, 0 FROM messages m"
            "  JOIN thread_messages t ON t.message = m.hash WHERE t.thread = ? AND m.hash = ?"
            "  UNION ALL SELECT m.hash, m.parent, m.role, m.created_at, path.depth + 1"
            "  FROM messages m JOIN path ON m.hash = path.parent) "
            "SELECT path.hash, path.parent, path.role, path.created_at, parts.type, parts.text, parts.payload "
            "FROM path LEFT JOIN parts ON parts.message = path.hash ORDER BY path.depth DESC, parts.position",
            (thread, tip),
        ).fetchall()
        if tip is not None and not rows:
            raise ChatNotFound(f"The chat {thread} has no message {tip!r}; `quire chats show {thread}` shows it.")
        return _stored_messages(rows)


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _chat(row: tuple[Any, ...]) -> Chat:
    chat_id, title, model, tip, created_at, updated_at = row
    return Chat(id=chat_id, title=title, model=model, tip=tip, created_at=created_at, updated_at=updated_at)


def _turn(row: tuple[Any, ...]) -> Turn:
    turn_id, parent, tip, model, params, status, partial, started_at, *numbers = row
    return Turn(
        id=turn_id,
        parent=parent,
        tip=tip,
        model=model,
        params=msgspec.json.decode(params),
        status=status,
        partial=partial,
        numbers=TurnNumbers(**dict(zip(TurnNumbers.__struct_fields__, numbers, strict=True))),
        started_at=started_at,
    )


def _stored_messages(rows: Sequence[tuple[Any, ...]]) -> list[StoredMessage]:
    """Messages from rows of (hash, parent, role, created_at, part), those of one message together."""
    parts: dict[str, list[Part]] = {}
    heads: dict[str, tuple[str | None, str, float]] = {}
    for hash_, parent, role, created_at, kind, text, payload in rows:
        heads[hash_] = (parent, role, created_at)
        held = parts.setdefault(hash_, [])
        if kind is not None:
            held.append(Part(kind, text, None if payload is None else msgspec.json.decode(payload)))
    return [
        StoredMessage(hash=hash_, parent=parent, message=Message(role, tuple(parts[hash_])), created_at=created_at)
        for hash_, (parent, role, created_at) in heads.items()
    ]
