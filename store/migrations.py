"""The schema of the database, as steps that are only ever appended.

Each step runs in one transaction together with the row that records it (`sqlite_utils.Migrations`,
table `_sqlite_migrations`).  Whether anything is to do is read without sqlite-utils, whose import takes
0.2 s: a database that is up to date never loads it.  Knows no paths; called by `store.database`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

_SET_NAME = "quire"

_CHATS = (
    """
    CREATE TABLE messages (
        hash TEXT PRIMARY KEY,
        parent TEXT REFERENCES messages (hash),
        role TEXT NOT NULL,
        created_at REAL NOT NULL
    )
    """,
    "CREATE INDEX messages_parent ON messages (parent)",
    """
    CREATE TABLE parts (
        id INTEGER PRIMARY KEY,
        message TEXT NOT NULL REFERENCES messages (hash) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        type TEXT NOT NULL,
        text TEXT NOT NULL,
        payload TEXT,
        UNIQUE (message, position)
    )
    """,
    """
    CREATE TABLE threads (
        id TEXT PRIMARY KEY,
        title TEXT NOT NULL,
        tip TEXT REFERENCES messages (hash),
        model TEXT NOT NULL,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL
    )
    """,
    "CREATE INDEX threads_updated_at ON threads (updated_at)",
    "CREATE INDEX threads_tip ON threads (tip)",
    """
    CREATE TABLE thread_messages (
        thread TEXT NOT NULL REFERENCES threads (id) ON DELETE CASCADE,
        message TEXT NOT NULL REFERENCES messages (hash),
        PRIMARY KEY (thread, message)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX thread_messages_message ON thread_messages (message)",
    """
    CREATE TABLE turns (
        id INTEGER PRIMARY KEY,
        thread TEXT NOT NULL REFERENCES threads (id) ON DELETE CASCADE,
        parent TEXT NOT NULL REFERENCES messages (hash),
        tip TEXT REFERENCES messages (hash),
        model TEXT NOT NULL,
        params TEXT NOT NULL,
        status TEXT NOT NULL CHECK (status IN ('streaming', 'done', 'cancelled', 'error')),
        partial TEXT NOT NULL DEFAULT '',
        prompt_tokens INTEGER,
        completion_tokens INTEGER,
        time_to_first_token_s REAL,
        tokens_per_s REAL,
        duration_s REAL,
        started_at REAL NOT NULL
    )
    """,
    "CREATE INDEX turns_thread ON turns (thread)",
    "CREATE INDEX turns_parent ON turns (parent)",
    "CREATE INDEX turns_tip ON turns (tip)",
    "CREATE INDEX turns_streaming ON turns (status) WHERE status = 'streaming'",
    # Trigrams find words inside Chinese text, which has no spaces for another tokenizer to go by.
    "CREATE VIRTUAL TABLE parts_fts USING fts5 (text, content='parts', content_rowid='id', tokenize='trigram')",
    """
    CREATE TRIGGER parts_insert AFTER INSERT ON parts BEGIN
        INSERT INTO parts_fts (rowid, text) VALUES (new.id, new.text);
    END
    """,
    """
    CREATE TRIGGER parts_delete AFTER DELETE ON parts BEGIN
        INSERT INTO parts_fts (parts_fts, rowid, text) VALUES ('delete', old.id, old.text);
    END
    """,
)

_USAGE = (
    """
    CREATE TABLE usage (
        model TEXT PRIMARY KEY,
        num_requests INTEGER NOT NULL,
        max_prompt_tokens INTEGER NOT NULL,
        max_output_tokens INTEGER NOT NULL,
        max_model_len INTEGER NOT NULL,
        last_used_at REAL NOT NULL
    )
    """,
    """
    CREATE TABLE usage_buckets (
        model TEXT NOT NULL REFERENCES usage (model) ON DELETE CASCADE,
        kind TEXT NOT NULL CHECK (kind IN ('prompt', 'output')),
        bucket INTEGER NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (model, kind, bucket)
    ) WITHOUT ROWID
    """,
)

_USAGE_AT_ONCE = ("ALTER TABLE usage ADD COLUMN max_at_once INTEGER NOT NULL DEFAULT 0",)

STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("m001_chats", _CHATS),
    ("m002_usage", _USAGE),
    ("m003_usage_at_once", _USAGE_AT_ONCE),
)
"""Name and statements of every step, oldest first."""


def applied_steps(connection: sqlite3.Connection) -> frozenset[str]:
    """The names of the steps that this database has had; none for an empty one."""
    has_record = connection.execute(
        "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = '_sqlite_migrations'"
    ).fetchone()
    if has_record is None:
        return frozenset()
    rows = connection.execute("SELECT name FROM _sqlite_migrations WHERE migration_set = ?", (_SET_NAME,))
    return frozenset(name for (name,) in rows)


def unknown_steps(connection: sqlite3.Connection) -> frozenset[str]:
    """Steps of a later version of Quire, whose schema this one does not know."""
    return applied_steps(connection) - {name for name, _ in STEPS}


def is_up_to_date(connection: sqlite3.Connection) -> bool:
    return applied_steps(connection) >= {name for name, _ in STEPS}


def migrate(connection: sqlite3.Connection, *, stop_before: str | None = None) -> None:
    """Apply the steps that are missing; `stop_before` makes an older database, for tests."""
    from sqlite_utils import Database, Migrations

    migrations = Migrations(_SET_NAME)
    for name, statements in STEPS:
        migrations(name=name)(_step(statements))
    migrations.apply(Database(connection), stop_before=stop_before)


def _step(statements: tuple[str, ...]) -> Callable[[Any], None]:
    def apply(database: Any) -> None:
        # One by one: `executescript` would commit the transaction that the step runs in.
        for statement in statements:
            database.execute(statement)

    return apply
