"""`quire chats` and `quire usage` on a real database, without a daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from store.chats.records import Message, TurnNumbers
from store.chats.tree import ChatsDb
from store.database import open_database
from store.paths import user_paths
from store.usage_db import Lengths, UsageDb
from tests.fakes.command_here import quire

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("QUIRE_CONFIG_DIR", "QUIRE_STATE_DIR", "QUIRE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("QUIRE_HOST", "QUIRE_PORT", "QUIRE_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def chat_ids() -> list[str]:
    """Two chats, the later one first."""
    connection = open_database(user_paths().database)
    chats = ChatsDb(connection)
    ids = []
    for question, answer, status in (
        ("天气怎么样？", "晴。", "done"),
        ("Tell me\na story", "Once \x1b[2J", "cancelled"),
    ):
        chat = chats.create("m")
        turn = chats.begin_turn(chat.id, [Message.of_text("user", question)], "m", {})
        chats.finish_turn(turn, status, Message.of_text("assistant", answer), TurnNumbers())  # type: ignore[arg-type]
        ids.insert(0, chat.id)
    lengths = Lengths(4096)
    lengths.add(100, 20, 0.0)
    UsageDb(connection).add({"m": lengths})
    connection.close()
    return ids


def test_before_the_first_chat(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chats") == 0
    assert capsys.readouterr().out.split() == ["ID", "TITLE", "MODEL", "CHANGED"]
    assert quire("usage", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"models": []}


def test_list_and_search(chat_ids: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chats") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ID", *chat_ids]
    assert quire("chats", "--limit", "1", "--json") == 0
    assert [chat["title"] for chat in json.loads(capsys.readouterr().out)["chats"]] == ["Tell me"]
    assert quire("chats", "search", "once") == 0
    assert "\x1b" not in (printed := capsys.readouterr().out)
    assert chat_ids[0] in printed
    for words, found in ((("天气",), chat_ids[1:]), (("a story",), chat_ids[:1]), (("story a x",), [])):
        assert quire("chats", "search", "--json", *words) == 0
        assert [hit["chat"]["id"] for hit in json.loads(capsys.readouterr().out)["hits"]] == found


def test_show_export_and_rename(chat_ids: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chats", "show", chat_ids[1]) == 0
    assert capsys.readouterr().out == "You:\n天气怎么样？\n\nm:\n晴。\n"
    assert quire("chats", "show", chat_ids[0]) == 0
    assert "(cancelled before its end)" in capsys.readouterr().out
    assert quire("chats", "export", chat_ids[1]) == 0
    assert "## You\n\n天气怎么样？\n" in capsys.readouterr().out
    assert quire("chats", "export", chat_ids[1], "--format", "jsonl", "-o", str(tmp_path / "chat.jsonl")) == 0
    assert len((tmp_path / "chat.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert quire("chats", "rename", chat_ids[1], "Weather") == 0
    assert quire("chats", "show", chat_ids[1], "--json") == 0
    assert json.loads(capsys.readouterr().out)["chat"]["title"] == "Weather"


def test_an_export_is_imported_once(chat_ids: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.jsonl"
    assert quire("chats", "export", chat_ids[1], "--format", "jsonl", "-o", str(file)) == 0
    assert quire("chats", "rm", chat_ids[1]) == 0
    capsys.readouterr()
    for told in ("1 chats saved; 0 were there already.", "0 chats saved; 1 were there already."):
        assert quire("chats", "import", str(file)) == 0
        assert capsys.readouterr().err.strip() == told
    assert quire("chats", "search", "天气") == 0
    assert "天气怎么样？" in capsys.readouterr().out
    file.write_text("nonsense")
    assert quire("chats", "import", str(file)) == 1
    assert "conversations.json" in capsys.readouterr().err
    assert quire("chats", "import", str(tmp_path / "absent")) == 1


def test_one_that_cannot_be_deleted_does_not_keep_the_others(
    chat_ids: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire("chats", "rm", "nonsense", *chat_ids) == 1
    printed = capsys.readouterr()
    assert "There is no chat 'nonsense'" in printed.err
    assert printed.err.count("Deleted") == 2
    assert quire("chats", "show", chat_ids[0]) == 1


@pytest.mark.usefixtures("chat_ids")
def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("usage") == 0
    printed = capsys.readouterr().out
    assert "m: Your requests so far (1) need 120 tokens" in printed
    assert quire("usage", "m", "--json") == 0
    (entry,) = json.loads(capsys.readouterr().out)["models"]
    assert (entry["requests"], entry["prompt_p99"], entry["needed_model_len"]) == (1, 100, 120)
    assert quire("usage", "other") == 1
    assert "has answered nothing yet" in capsys.readouterr().err


def test_listing_models_loads_no_database() -> None:
    code = "import sys, app.cli.application, app.cli.installed, app.translate.admin; sys.exit('sqlite3' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
