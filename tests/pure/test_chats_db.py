from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from store.chats.export import as_json_lines, as_markdown
from store.chats.records import Message, Part, TurnNumbers, message_hash, new_chat_id, title_of
from store.chats.search import search_chats, search_terms, snippet
from store.chats.tree import ChatsDb
from store.database import open_database
from store.errors import ChatNotFound
from store.migrations import migrate

NUMBERS = TurnNumbers(prompt_tokens=9, completion_tokens=3, time_to_first_token_s=0.25, duration_s=1.0)


def user(text: str) -> Message:
    return Message.of_text("user", text)


def assistant(text: str) -> Message:
    return Message.of_text("assistant", text)


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = open_database(tmp_path / "quire.db")
    yield connection
    connection.close()


@pytest.fixture
def chats(connection: sqlite3.Connection) -> ChatsDb:
    times = count(1_700_000_000)
    return ChatsDb(connection, clock=lambda: float(next(times)))


def say(chats: ChatsDb, chat_id: str, *messages: Message, answer: str) -> None:
    turn = chats.begin_turn(chat_id, messages, "m", {})
    chats.finish_turn(turn, "done", assistant(answer), NUMBERS)


def texts(chats: ChatsDb, chat_id: str, tip: str | None = None) -> list[str]:
    return [stored.message.text for stored in chats.messages(chat_id, tip)]


def num_messages(connection: sqlite3.Connection) -> int:
    (number,) = connection.execute("SELECT count(*) FROM messages").fetchone()
    assert isinstance(number, int)
    return number


def test_a_conversation_is_kept_in_order_with_its_numbers(chats: ChatsDb) -> None:
    chat = chats.create("m")
    system = Message.of_text("system", "Be brief.")
    turn = chats.begin_turn(chat.id, [system, user("Hello?\nAre you there?")], "m", {"seed": 7}, revision="org/m@abc")
    assert texts(chats, chat.id) == ["Be brief.", "Hello?\nAre you there?"]
    chats.save_partial(turn, "Ye")
    (running,) = chats.turns(chat.id)
    assert (running.status, running.partial, running.tip) == ("streaming", "Ye", None)
    chats.finish_turn(turn, "done", assistant("Yes."), NUMBERS)
    (ended,) = chats.turns(chat.id)
    assert (ended.status, ended.partial, ended.model, ended.params) == ("done", "", "org/m@abc", {"seed": 7})
    assert ended.numbers == NUMBERS
    assert texts(chats, chat.id)[-1] == "Yes."
    assert chats.messages(chat.id)[-1].hash == ended.tip
    (listed,) = chats.chats()
    assert (listed.title, listed.tip) == ("Hello?", ended.tip)


def test_an_edited_question_adds_only_its_own_rows(chats: ChatsDb, connection: sqlite3.Connection) -> None:
    chat = chats.create("m")
    say(chats, chat.id, user("1?"), answer="1.")
    say(chats, chat.id, user("1?"), assistant("1."), user("2?"), answer="2.")
    before = num_messages(connection)
    say(chats, chat.id, user("1?"), assistant("1."), user("2, please?"), answer="Two.")
    assert num_messages(connection) == before + 2
    assert texts(chats, chat.id) == ["1?", "1.", "2, please?", "Two."]
    first_branch = chats.turns(chat.id)[1].tip
    assert texts(chats, chat.id, first_branch) == ["1?", "1.", "2?", "2."]


def test_a_fork_shares_its_messages_and_outlives_its_origin(chats: ChatsDb, connection: sqlite3.Connection) -> None:
    chat = chats.create("m")
    say(chats, chat.id, user("1?"), answer="1.")
    middle = chats.messages(chat.id)[-1].hash
    say(chats, chat.id, user("1?"), assistant("1."), user("2?"), answer="2.")
    before = num_messages(connection)
    fork = chats.fork(chat.id, middle)
    assert num_messages(connection) == before
    assert texts(chats, fork.id) == ["1?", "1."]
    chats.delete(chat.id)
    assert texts(chats, fork.id) == ["1?", "1."]
    assert num_messages(connection) == 2
    chats.delete(fork.id)
    assert num_messages(connection) == 0
    assert search_chats(connection, "1?") == []


def test_the_same_content_has_the_same_hash_and_any_other_another() -> None:
    message = Message("user", (Part("text", "a"), Part("image", payload={"id": "x", "width": 1})))
    same = Message("user", (Part("text", "a"), Part("image", payload={"width": 1, "id": "x"})))
    assert message_hash(message, None) == message_hash(same, None)
    others = [
        (message, "p"),
        (Message("assistant", message.parts), None),
        (Message("user", message.parts[:1]), None),
        (Message("user", (Part("text", "a"), Part("image", payload={"id": "y", "width": 1}))), None),
    ]
    hashes = {message_hash(*other) for other in others} | {message_hash(message, None)}
    assert len(hashes) == len(others) + 1


def test_parts_come_back_as_they_were(chats: ChatsDb) -> None:
    chat = chats.create("m")
    call = Message("assistant", (Part("reasoning", "hm"), Part("tool_call", payload={"name": "f", "arguments": "{}"})))
    chats.begin_turn(chat.id, [user("\0 NUL, \U0001f600, e\u0301"), call, Message("tool", ())], "m", {})
    assert [stored.message for stored in chats.messages(chat.id)] == [
        user("\0 NUL, \U0001f600, e\u0301"),
        call,
        Message("tool", ()),
    ]


def test_what_a_dead_daemon_left_is_cancelled_with_its_text(chats: ChatsDb) -> None:
    silent, cut, empty = (chats.create("m") for _ in range(3))
    chats.begin_turn(silent.id, [user("typed")], "m", {})
    chats.save_partial(chats.begin_turn(cut.id, [user("and this")], "m", {}), "Once upon")
    assert chats.cancel_leftovers() == 2
    assert chats.cancel_leftovers() == 0
    assert texts(chats, silent.id) == ["typed"]
    assert texts(chats, cut.id) == ["and this", "Once upon"]
    assert [turn.status for one in (silent, cut) for turn in chats.turns(one.id)] == ["cancelled", "cancelled"]
    with pytest.raises(ChatNotFound):
        chats.chat(empty.id)


def test_an_answer_to_an_abandoned_question_does_not_move_the_chat(chats: ChatsDb) -> None:
    chat = chats.create("m")
    slow = chats.begin_turn(chat.id, [user("slow?")], "m", {})
    say(chats, chat.id, user("quick?"), answer="Quick.")
    chats.finish_turn(slow, "done", assistant("Slow."), NUMBERS)
    assert texts(chats, chat.id) == ["quick?", "Quick."]
    assert texts(chats, chat.id, chats.turns(chat.id)[0].tip) == ["slow?", "Slow."]


def test_writes_to_a_deleted_chat_do_nothing(chats: ChatsDb, connection: sqlite3.Connection) -> None:
    chat = chats.create("m")
    turn = chats.begin_turn(chat.id, [user("hi")], "m", {})
    chats.delete(chat.id)
    chats.save_partial(turn, "x")
    chats.finish_turn(turn, "done", assistant("x"), NUMBERS)
    assert num_messages(connection) == 0
    with pytest.raises(ChatNotFound):
        chats.begin_turn(chat.id, [user("hi")], "m", {})
    assert num_messages(connection) == 0


def test_ids_sort_by_time_and_a_beginning_is_enough(chats: ChatsDb) -> None:
    first, second = new_chat_id(1.0), new_chat_id(1.5)
    assert len(first) == 16
    assert first < second
    a, b = chats.create("m"), chats.create("m")
    shared = next(i for i, (x, y) in enumerate(zip(a.id, b.id, strict=True)) if x != y)
    assert chats.chat(a.id[: shared + 1].upper()) == a
    for wrong in ("", a.id[:shared], a.id + "0", "%", "_" * 16, "nonsense", "\0", "ü", "\udcff"):
        with pytest.raises(ChatNotFound):
            chats.chat(wrong)


def test_the_list_has_the_latest_first_and_filters_by_model(chats: ChatsDb) -> None:
    for model in ("a", "b", "a"):
        chats.begin_turn(chats.create(model).id, [user(model)], model, {})
    chats.create("a")
    assert [chat.model for chat in chats.chats()] == ["a", "b", "a"]
    assert [chat.model for chat in chats.chats(model="b")] == ["b"]
    assert len(chats.chats(limit=1)) == 1
    renamed = chats.rename(chats.chats(model="b")[0].id, " Better\n\x1b[2J title ")
    assert chats.chat(renamed.id).title == renamed.title == "Better [2J title"


@pytest.mark.parametrize(
    ("text", "title"), [("  \n", ""), ("a\nb", "a"), ("word " * 30, "word " * 11 + "word…"), ("  x  ", "x")]
)
def test_titles(text: str, title: str) -> None:
    assert title_of([Message.of_text("system", "S"), user(text)]) == title


@pytest.fixture
def weather(chats: ChatsDb, connection: sqlite3.Connection) -> sqlite3.Connection:
    for question, answer in (
        ("今天北京天气怎么样？", "晴朗，适合去公园散步。"),
        ("How is std::vector stored?", 'In one piece; "AND" is a word, 100 % sure.'),
        ("What is a_b?", "An identifier."),
        ("东京的天气呢？", "有雨。"),
    ):
        chat = chats.create("m")
        say(chats, chat.id, Message.of_text("system", "You know the weather, 天气."), user(question), answer=answer)
    return connection


@pytest.mark.parametrize(
    ("query", "titles"),
    [
        ("天气", ["东京的天气呢？", "今天北京天气怎么样？"]),
        ("雨", ["东京的天气呢？"]),
        ("公园散步", ["今天北京天气怎么样？"]),
        ("公园散步 晴", ["今天北京天气怎么样？"]),
        ("公园散步 雪", []),
        ("std::vector", ["How is std::vector stored?"]),
        ("STD::V stored", ["How is std::vector stored?"]),
        ('"one piece"', ["How is std::vector stored?"]),
        ('"piece one"', []),
        ('AND "word"', ["How is std::vector stored?"]),
        ("0 % sure", ["How is std::vector stored?"]),
        ("_b", ["What is a_b?"]),
        ("a_b", ["What is a_b?"]),
        ("NEAR(a b", []),
        ("*", []),
        ("", []),
        ('" "', []),
        ("\udcff", []),
    ],
)
def test_search(weather: sqlite3.Connection, query: str, titles: list[str]) -> None:
    assert [hit.chat.title for hit in search_chats(weather, query)] == titles


def test_a_search_finds_titles_and_shows_where(chats: ChatsDb, weather: sqlite3.Connection) -> None:
    chats.rename(chats.chats()[0].id, "Rain in Tokyo")
    (hit,) = search_chats(weather, "tokyo")
    assert (hit.role, hit.snippet) == ("title", "Rain in Tokyo")
    (hit,) = search_chats(weather, "identifier")
    assert (hit.role, hit.snippet) == ("assistant", "An identifier.")
    assert len(search_chats(weather, "天气", limit=1)) == 1


@given(st.text(st.sampled_from("ab天气\"*-:^(){}%_\\\0'N "), max_size=12))
@example("NOT AND OR NEAR")
def test_no_query_is_read_as_syntax(query: str) -> None:
    connection = sqlite3.connect(":memory:")
    migrate(connection)
    chats = ChatsDb(connection)
    terms = search_terms(query)
    say(chats, chats.create("m").id, user(f"before {' '.join(terms)} after"), answer="x")
    assert len(search_chats(connection, query)) == (1 if terms else 0)
    connection.close()


def test_a_snippet_is_the_text_around_the_first_term() -> None:
    text = "x" * 200 + "\n needle " + "y" * 200
    shown = snippet(text, ["absent", "NEEDLE"])
    assert "needle" in shown
    assert shown.startswith("…x") and shown.endswith("y…")
    assert len(shown) <= 122 and "\n" not in shown
    assert snippet("İ short", ["short"]) == "İ short"
    assert search_terms(' a "b c" "" d"e ') == ["a", "b c", 'd"e']


def test_exports(chats: ChatsDb) -> None:
    chat = chats.create("m")
    say(chats, chat.id, user('Say "hi": now'), answer="**hi**")
    turn = chats.begin_turn(
        chat.id, [user('Say "hi": now'), assistant("**hi**"), user("more")], "m", {"seed": 1}, revision="org/m@c"
    )
    chats.finish_turn(turn, "cancelled", assistant("Mo"), TurnNumbers())
    arguments = (chats.chat(chat.id), chats.messages(chat.id), chats.turns(chat.id))
    markdown = as_markdown(*arguments)
    assert markdown.startswith('---\ntitle: "Say \\"hi\\": now"\nid: "')
    assert "\n## You\n\nmore\n\n## org/m@c\n\nMo\n\n*(cancelled before its end)*\n" in markdown
    lines = [json.loads(line) for line in as_json_lines(*arguments).splitlines()]
    assert [(line["role"], line["content"]) for line in lines] == [
        ("user", 'Say "hi": now'),
        ("assistant", "**hi**"),
        ("user", "more"),
        ("assistant", "Mo"),
    ]
    assert lines[1]["completion_tokens"] == 3
    assert (lines[3]["status"], lines[3]["params"], lines[3]["parent"]) == ("cancelled", {"seed": 1}, lines[2]["hash"])


class Tree(RuleBasedStateMachine):
    """Asks, edits, forks, cancels and deletes in any order, against a model that keeps each chat as a plain list."""

    chat_ids = Bundle("chat_ids")

    @initialize()
    def open(self) -> None:
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("PRAGMA foreign_keys = ON")
        migrate(self.connection)
        times = count(1_700_000_000)
        self.chats = ChatsDb(self.connection, clock=lambda: float(next(times)))
        self.branches: dict[str, list[tuple[str, ...]]] = {}

    @rule(target=chat_ids)
    def create(self) -> str:
        chat = self.chats.create("m")
        self.branches[chat.id] = []
        return chat.id

    @rule(chat_id=chat_ids, data=st.data(), text=st.sampled_from("ab"), answer=st.sampled_from(["x", "y", ""]))
    def ask(self, chat_id: str, data: st.DataObject, text: str, answer: str) -> None:
        """Goes on from any point of any branch: at its end, by an edit, or from nothing."""
        if chat_id not in self.branches:
            return
        branch = data.draw(st.sampled_from([(), *self.branches[chat_id]]))
        kept = branch[: data.draw(st.integers(0, len(branch) // 2)) * 2]
        roles = ("user", "assistant")
        history = [Message.of_text(roles[i % 2], said) for i, said in enumerate((*kept, text))]
        turn = self.chats.begin_turn(chat_id, history, "m", {})
        self.chats.save_partial(turn, answer)
        if data.draw(st.booleans()):
            self.chats.finish_turn(turn, "done", assistant(answer) if answer else None, NUMBERS)
        else:
            self.chats.cancel_leftovers()
            for gone in [one for one, branches in self.branches.items() if not branches and one != chat_id]:
                del self.branches[gone]
        said = (*kept, text, answer) if answer else (*kept, text)
        self.branches[chat_id].append(said)
        assert tuple(texts(self.chats, chat_id)) == said

    @rule(target=chat_ids, chat_id=chat_ids, data=st.data())
    def fork(self, chat_id: str, data: st.DataObject) -> object:
        if not self.branches.get(chat_id):
            return multiple()
        stored = self.chats.messages(chat_id)
        at = data.draw(st.integers(0, len(stored) - 1))
        fork = self.chats.fork(chat_id, stored[at].hash)
        self.branches[fork.id] = [tuple(one.message.text for one in stored[: at + 1])]
        return fork.id

    @rule(chat_id=consumes(chat_ids))
    def delete(self, chat_id: str) -> None:
        if chat_id in self.branches:
            self.chats.delete(chat_id)
            del self.branches[chat_id]

    @invariant()
    def nothing_dangles_and_nothing_is_lost(self) -> None:
        connection = self.connection
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.in_transaction is False
        connection.execute("INSERT INTO parts_fts (parts_fts, rank) VALUES ('integrity-check', 1)")
        connection.commit()
        expected = {
            branch[: i + 1] for branches in self.branches.values() for branch in branches for i in range(len(branch))
        }
        stored = connection.execute("SELECT hash FROM messages").fetchall()
        assert len(stored) == len(expected)
        for chat_id, branches in self.branches.items():
            tips = [turn.tip or turn.parent for turn in self.chats.turns(chat_id)]
            said = {tuple(texts(self.chats, chat_id, tip)) for tip in tips}
            assert said <= set(branches)
            assert set(branches) - said <= set(branches[:1])

    def teardown(self) -> None:
        if hasattr(self, "connection"):
            self.connection.close()


Tree.TestCase.settings = settings(max_examples=100, stateful_step_count=25)
test_any_order_of_changes_keeps_the_tree_whole = Tree.TestCase
