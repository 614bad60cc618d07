from __future__ import annotations

import pytest

from app.schema.chats import ChatMessageEntry
from tui.commands import Command, UnknownCommand, parse_command
from tui.conversation import Conversation, PromptHistory


def test_a_question_without_an_answer_is_taken_back() -> None:
    conversation = Conversation("Be brief.")
    conversation.ask("one")
    conversation.answer("1")
    conversation.ask("two")
    conversation.answer("")
    conversation.ask("three")
    assert [message["content"] for message in conversation.messages] == ["Be brief.", "one", "1", "three"]


@pytest.mark.parametrize(
    ("own_system", "said", "messages", "awaited"),
    [
        (None, "", "", ""),
        (None, "sua", "sua", ""),
        (None, "suau", "sua", "3"),
        ("own", "sua", "oua", ""),
        ("own", "u", "o", "0"),
    ],
)
def test_a_saved_conversation_is_restored(own_system: str | None, said: str, messages: str, awaited: str) -> None:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    saved = [
        ChatMessageEntry(hash=str(i), parent=None, role=roles[role], content=str(i), created_at="")
        for i, role in enumerate(said)
    ]
    conversation = Conversation(own_system)
    assert conversation.restore(saved) == awaited
    assert "".join("o" if one["content"] == "own" else one["role"][0] for one in conversation.messages) == messages


def test_history_walks_back_and_returns_to_the_draft() -> None:
    history = PromptHistory()
    assert history.older("draft") is None
    assert history.newer() is None
    for prompt in ("a", "b", "b"):
        history.add(prompt)
    assert history.older("draft") == "b"
    assert history.older("b") == "a"
    assert history.older("a") is None
    assert history.newer() == "b"
    assert history.newer() == "draft"
    assert history.newer() is None


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/clear", Command.CLEAR),
        (" /BYE ", Command.BYE),
        ("/exit", Command.BYE),
        ("/?", Command.HELP),
        ("/help", Command.HELP),
        ("hello", None),
        ("/etc/hosts", None),
        ("/clear the table, please", None),
        ("/", None),
        ("1/2", None),
    ],
)
def test_commands(text: str, command: Command | None) -> None:
    assert parse_command(text) is command


def test_an_unknown_command_names_the_way_out() -> None:
    with pytest.raises(UnknownCommand, match=r"/claer.*/help"):
        parse_command("/claer")
