from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.chats.export import as_json_lines
from store.chats.imports import read_chats
from store.chats.tree import ChatsDb
from store.database import open_database
from store.errors import UnsupportedFormat
from store.migrations import migrate


def node(parent: str | None, role: str | None = None, *parts: Any, **metadata: str) -> dict[str, Any]:
    message = {"author": {"role": role}, "content": {"content_type": "text", "parts": parts}, "metadata": metadata}
    return {"id": "ignored", "parent": parent, "children": [], "message": message if role else None}


CONVERSATION = {
    "title": "Weather",
    "create_time": 1_700_000_000.25,
    "current_node": "answer",
    "mapping": {
        "root": node(None),
        "system": node("root", "system", ""),
        "question": node("system", "user", "天气?"),
        "search": node("question", "tool", "{}"),
        "answer": node("search", "assistant", "Sunny.", model_slug="gpt-x"),
        "retried": node("question", "assistant", "Rain."),
        "picture": node("retried", "user", {"asset_pointer": "file://1"}, "What is this?"),
    },
}


@pytest.fixture
def chats(tmp_path: Path) -> Iterator[ChatsDb]:
    connection = open_database(tmp_path / "quire.db")
    yield ChatsDb(connection)
    connection.close()


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_a_chatgpt_export_brings_every_branch_and_shows_the_current_one(tmp_path: Path, chats: ChatsDb) -> None:
    file = write(tmp_path / "conversations.json", [CONVERSATION, {"mapping": {}}])
    (imported,) = read_chats(file)
    assert (imported.title, imported.model, imported.created_at) == ("Weather", "gpt-x", 1_700_000_000.25)
    assert [[one.text for one in branch] for branch in imported.branches] == [
        ["天气?", "Rain.", "What is this?"],
        ["天气?", "Sunny."],
    ]
    chat, is_new = chats.add(imported)
    assert is_new
    assert [one.message.text for one in chats.messages(chat.id)] == ["天气?", "Sunny."]
    assert chats.chats()[0].created_at == 1_700_000_000.25
    assert chats.add(imported) == (chat, False)
    assert len(chats.chats()) == 1


def test_what_was_exported_comes_back(tmp_path: Path, chats: ChatsDb) -> None:
    (imported,) = read_chats(write(tmp_path / "conversations.json", [CONVERSATION]))
    chat, _ = chats.add(imported)
    lines = as_json_lines(chat, chats.messages(chat.id), [])
    (tmp_path / "chat.jsonl").write_text(lines, encoding="utf-8")
    (again,) = read_chats(tmp_path / "chat.jsonl")
    assert chats.add(again) == (chat, False)
    chats.delete(chat.id)
    restored, is_new = chats.add(again)
    assert is_new
    assert restored.title == "天气?"
    assert as_json_lines(restored, chats.messages(restored.id), []).count("\n") == 2


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{}", b"[1]", b'{"chat": 1}', b"[" * 100_000, b'[{"mapping": []}]'])
def test_a_file_that_holds_no_chats_is_explained(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UnsupportedFormat, match=r"conversations\.json"):
        read_chats(tmp_path / "x")


names = st.sampled_from("abcd")
nodes = st.builds(
    node, st.none() | names, st.sampled_from([None, "user", "assistant", "tool"]), st.sampled_from(["x", "", "y"])
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.dictionaries(names, nodes, max_size=4), st.none() | names, st.floats(allow_nan=False, allow_infinity=False))
def test_any_tree_is_read_even_one_that_bites_its_tail(
    tmp_path: Path, mapping: dict[str, Any], current: str | None, time_s: float
) -> None:
    conversation = {"mapping": mapping, "current_node": current, "create_time": time_s}
    for imported in read_chats(write(tmp_path / "c.json", [conversation])):
        connection = sqlite3.connect(":memory:")
        migrate(connection)
        chat, _ = ChatsDb(connection).add(imported)
        assert chat.created_at <= 253_402_300_799
        assert ChatsDb(connection).messages(chat.id)
        connection.close()
