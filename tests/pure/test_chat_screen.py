from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import OptionList
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from app.client import ChatEvent, ChatFinished, ClientError, TextDelta
from app.schema.admin import ProgressLine
from app.schema.chats import ChatDetails, ChatEntry, ChatMessageEntry
from tui.app import ChatApp
from tui.screens.chat import ChatScreen
from tui.screens.history import HistoryScreen
from tui.widgets.live_markdown import PlainFence
from tui.widgets.message import AssistantMessage, Notice, UserMessage
from tui.widgets.prompt_input import PromptInput
from tui.widgets.status import HeaderLine, StatusLine
from tui.widgets.transcript import Transcript

FINISHED = ChatFinished(
    finish_reason="stop",
    prompt_tokens=9,
    completion_tokens=41,
    cached_tokens=0,
    time_to_first_token_s=0.25,
    duration_s=1.25,
)


def saved_chat(chat_id: str, *texts: str, roles: Sequence[str] = ("user", "assistant")) -> ChatDetails:
    """A chat as the daemon gives it, with these texts in turn."""
    at = "2026-01-01T00:00:00Z"
    entry = ChatEntry(id=chat_id, title=f"Title [{chat_id}", model="m", tip="0", created_at=at, updated_at=at)
    messages = tuple(
        ChatMessageEntry(hash=str(i), parent=None, role=roles[i % len(roles)], content=text, created_at=at)
        for i, text in enumerate(texts)
    )
    return ChatDetails(entry, messages, ())


class FakeChats:
    """The saved chats of a daemon; `error` is what creating one fails with."""

    def __init__(self) -> None:
        self.saved: dict[str, ChatDetails] = {}
        self.num_created = 0
        self.error: ClientError | None = None

    async def list(self) -> tuple[ChatEntry, ...]:
        return tuple(details.chat for details in self.saved.values())

    async def get(self, chat_id: str) -> ChatDetails:
        return self.saved[chat_id]

    async def create(self, model: str) -> ChatEntry:
        if self.error:
            raise self.error
        self.num_created += 1
        return saved_chat(f"new{self.num_created}").chat


class FakeClient:
    """Answers each chat with the next script: text, an error to raise, or an event to wait for."""

    def __init__(
        self,
        *scripts: Sequence[str | ClientError | asyncio.Event],
        load_error: ClientError | None = None,
        load_gates: tuple[asyncio.Event, ...] = (),
        load_status: str = "",
    ) -> None:
        self.scripts = list(scripts)
        self.load_error = load_error
        self.load_gates = load_gates
        self.load_status = load_status
        self.requests: list[list[dict[str, Any]]] = []
        self.params: list[dict[str, Any]] = []
        self.chat_ids: list[str | None] = []
        self.num_closed = 0
        self.chats = FakeChats()

    async def chat(
        self, messages: Sequence[dict[str, Any]], model: str, *, chat_id: str | None = None, **params: Any
    ) -> AsyncGenerator[ChatEvent, None]:
        self.requests.append([dict(message) for message in messages])
        self.chat_ids.append(chat_id)
        self.params.append(params)
        try:
            for step in self.scripts.pop(0):
                match step:
                    case str():
                        yield TextDelta(step)
                    case asyncio.Event():
                        await step.wait()
                    case error:
                        raise error
            yield FINISHED
        finally:
            self.num_closed += 1

    async def load(self, model: str) -> AsyncGenerator[ProgressLine, None]:
        for i, gate in enumerate(self.load_gates):
            yield ProgressLine(self.load_status) if self.load_status else ProgressLine("loading weights", None, 4, i)
            await gate.wait()
        if self.load_error:
            raise self.load_error


async def wait_until(pilot: Pilot[None], predicate: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not predicate():
            await pilot.pause(0.01)


def screen_of(pilot: Pilot[None]) -> ChatScreen:
    screen = pilot.app.screen
    assert isinstance(screen, ChatScreen)
    return screen


async def ask(pilot: Pilot[None], text: str) -> None:
    pilot.app.screen.query_one(PromptInput).text = text
    await pilot.press("enter")


async def ask_and_wait(pilot: Pilot[None], text: str, client: FakeClient) -> None:
    """Send a prompt and wait for the end of its answer."""
    expected = client.num_closed + 1
    await ask(pilot, text)
    await wait_until(pilot, lambda: client.num_closed == expected and not screen_of(pilot).is_answering)
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


def texts(pilot: Pilot[None], kind: type[UserMessage] | type[AssistantMessage] | type[Notice]) -> list[str]:
    return [widget.text for widget in pilot.app.screen.query(kind)]


async def test_an_answer_is_shown_with_its_numbers() -> None:
    client = FakeClient(["The capital ", "is **Paris**."])
    async with ChatApp(client, "m", system="Be brief.", params={"seed": 7}).run_test() as pilot:
        await ask_and_wait(pilot, "What is the capital of France?", client)
        assert texts(pilot, UserMessage) == ["What is the capital of France?"]
        assert texts(pilot, AssistantMessage) == ["The capital is **Paris**."]
        (block,) = pilot.app.screen.query(MarkdownBlock)
        assert block._content.plain == "The capital is Paris."
        assert pilot.app.screen.query_one(StatusLine).message == "41 tokens · 40.0 tok/s · first token 0.25 s"
        assert pilot.app.screen.query_one(HeaderLine).state_text == "ready"
        assert pilot.app.screen.query_one(PromptInput).text == ""
    assert client.params == [{"seed": 7}]
    assert client.requests == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
    ]


async def test_the_next_question_carries_the_conversation_and_clear_forgets_it() -> None:
    client = FakeClient(["One."], ["Two."], ["Three."])
    async with ChatApp(client, "m").run_test() as pilot:
        await ask_and_wait(pilot, "1?", client)
        await ask_and_wait(pilot, "2?", client)
        assert [message["content"] for message in client.requests[1]] == ["1?", "One.", "2?"]
        await ask(pilot, "/clear")
        await wait_until(pilot, lambda: not pilot.app.screen.query(AssistantMessage))
        await ask_and_wait(pilot, "3?", client)
        assert [message["content"] for message in client.requests[2]] == ["3?"]


async def test_text_shows_while_the_answer_still_runs() -> None:
    gate = asyncio.Event()
    client = FakeClient(["Half", gate, " and half."])
    async with ChatApp(client, "m").run_test() as pilot:
        await ask(pilot, "Go")
        await wait_until(pilot, lambda: any(b._content.plain == "Half" for b in pilot.app.screen.query(MarkdownBlock)))
        assert pilot.app.screen.query_one(HeaderLine).state_text == "answering"
        gate.set()
        await wait_until(pilot, lambda: texts(pilot, AssistantMessage) == ["Half and half."])


async def test_escape_stops_the_answer_and_keeps_the_partial_text() -> None:
    client = FakeClient(["Once upon a time", asyncio.Event()], ["Yes."])
    async with ChatApp(client, "m").run_test() as pilot:
        await ask(pilot, "A story")
        await wait_until(pilot, lambda: texts(pilot, AssistantMessage) == ["Once upon a time"])
        await pilot.press("escape")
        await wait_until(pilot, lambda: client.num_closed == 1 and not screen_of(pilot).is_answering)
        assert texts(pilot, AssistantMessage) == ["Once upon a time"]
        assert "Stopped" in pilot.app.screen.query_one(StatusLine).message
        await ask_and_wait(pilot, "Go on", client)
        assert [message["content"] for message in client.requests[1]] == ["A story", "Once upon a time", "Go on"]


async def test_escape_before_the_first_token_takes_the_question_back() -> None:
    client = FakeClient([asyncio.Event()], ["Hello."])
    async with ChatApp(client, "m").run_test() as pilot:
        await ask(pilot, "first")
        await wait_until(pilot, lambda: len(client.requests) == 1)
        await pilot.press("escape")
        await wait_until(pilot, lambda: client.num_closed == 1 and not screen_of(pilot).is_answering)
        await ask_and_wait(pilot, "second", client)
        assert [message["content"] for message in client.requests[1]] == ["second"]


async def test_text_typed_during_an_answer_stays_in_the_input() -> None:
    gate = asyncio.Event()
    client = FakeClient(["Wait", gate], ["Now."])
    async with ChatApp(client, "m").run_test() as pilot:
        await ask(pilot, "one")
        await wait_until(pilot, lambda: screen_of(pilot).is_answering)
        await pilot.press("t", "w", "o", "enter")
        assert pilot.app.screen.query_one(PromptInput).text == "two"
        await wait_until(pilot, lambda: "Still answering" in pilot.app.screen.query_one(StatusLine).message)
        assert len(client.requests) == 1
        gate.set()
        await wait_until(pilot, lambda: not screen_of(pilot).is_answering)
        await pilot.press("enter")
        await wait_until(pilot, lambda: len(client.requests) == 2)


async def test_an_error_is_a_line_in_the_transcript_and_up_recalls_the_prompt() -> None:
    client = FakeClient([ClientError(503, "worker_died", "The worker ended; ask again.")], ["Fine."])
    async with ChatApp(client, "m").run_test() as pilot:
        await ask_and_wait(pilot, "Hello?", client)
        (notice,) = texts(pilot, Notice)
        assert notice.startswith("The worker ended; ask again.")
        assert texts(pilot, AssistantMessage) == []
        await pilot.press("up")
        assert pilot.app.screen.query_one(PromptInput).text == "Hello?"
        await pilot.press("enter")
        await wait_until(pilot, lambda: texts(pilot, AssistantMessage) == ["Fine."])
        assert [message["content"] for message in client.requests[1]] == ["Hello?"]


async def test_an_error_after_some_text_keeps_the_text() -> None:
    client = FakeClient(["Some text", ClientError(503, "stream_ended", "The daemon stopped; ask again.")])
    async with ChatApp(client, "m").run_test() as pilot:
        await ask_and_wait(pilot, "Hello?", client)
        assert texts(pilot, AssistantMessage) == ["Some text"]
        assert len(texts(pilot, Notice)) == 1


async def test_a_model_that_cannot_load_says_why() -> None:
    client = FakeClient(load_error=ClientError(422, "unsupported_model", "This is not supported; try another."))
    async with ChatApp(client, "m").run_test() as pilot:
        await wait_until(pilot, lambda: texts(pilot, Notice) == ["This is not supported; try another."])
        assert pilot.app.screen.query_one(HeaderLine).state_text == "not loaded"


async def test_a_question_asked_during_loading_waits_and_loading_stays_visible() -> None:
    gates, answer = (asyncio.Event(), asyncio.Event()), asyncio.Event()
    client = FakeClient([answer, "Hello."], load_gates=gates)
    async with ChatApp(client, "m").run_test() as pilot:
        header = pilot.app.screen.query_one(HeaderLine)
        await wait_until(pilot, lambda: header.state_text == "loading weights 0 %")
        await ask(pilot, "Hi")
        await wait_until(pilot, lambda: len(client.requests) == 1)
        assert header.state_text == "loading weights 0 %"
        gates[0].set()
        await wait_until(pilot, lambda: header.state_text == "loading weights 25 %")
        gates[1].set()
        await wait_until(pilot, lambda: header.state_text == "waiting")
        answer.set()
        await wait_until(pilot, lambda: texts(pilot, AssistantMessage) == ["Hello."])
        await wait_until(pilot, lambda: header.state_text == "ready")


async def test_a_load_that_fails_under_a_waiting_question_is_told_once() -> None:
    gate, answer = asyncio.Event(), asyncio.Event()
    error = ClientError(422, "unsupported_model", "This is not supported; try another.")
    client = FakeClient([answer, error], load_error=error, load_gates=(gate,))
    async with ChatApp(client, "m").run_test() as pilot:
        await ask(pilot, "Hi")
        await wait_until(pilot, lambda: len(client.requests) == 1)
        gate.set()
        await wait_until(pilot, lambda: pilot.app.screen.query_one(HeaderLine).state_text == "not loaded")
        answer.set()
        await wait_until(pilot, lambda: not screen_of(pilot).is_answering)
        assert len(texts(pilot, Notice)) == 1


async def test_a_model_that_left_meanwhile_shows_how_it_comes_back() -> None:
    gate, answer = asyncio.Event(), asyncio.Event()
    client = FakeClient([answer, "Hello."])
    async with ChatApp(client, "m").run_test() as pilot:
        header = pilot.app.screen.query_one(HeaderLine)
        await wait_until(pilot, lambda: header.state_text == "ready")
        client.load_gates = (gate,)
        await ask(pilot, "Hi")
        await wait_until(pilot, lambda: header.state_text == "loading weights 0 %")
        gate.set()
        await wait_until(pilot, lambda: header.state_text == "waiting")
        answer.set()
        await wait_until(pilot, lambda: header.state_text == "ready")
        assert texts(pilot, AssistantMessage) == ["Hello."]


async def test_a_model_that_cannot_come_back_is_told_once() -> None:
    failure = asyncio.Event()
    error = ClientError(503, "insufficient_memory", "There is no room; stop another model.")
    client = FakeClient([failure, error])
    async with ChatApp(client, "m").run_test() as pilot:
        header = pilot.app.screen.query_one(HeaderLine)
        await wait_until(pilot, lambda: header.state_text == "ready")
        client.load_error = error
        await ask(pilot, "Hi")
        await wait_until(pilot, lambda: header.state_text == "not loaded")
        failure.set()
        await wait_until(pilot, lambda: not screen_of(pilot).is_answering)
        assert texts(pilot, Notice) == ["There is no room; stop another model. Up recalls your prompt."]


async def test_what_stands_in_the_way_is_told_until_it_is_gone() -> None:
    gate = asyncio.Event()
    client = FakeClient(load_gates=(gate,), load_status="m needs 5 GB and n keeps 4 GB (busy); wait until it is idle.")
    async with ChatApp(client, "m").run_test() as pilot:
        header = pilot.app.screen.query_one(HeaderLine)
        await wait_until(pilot, lambda: header.state_text == "waiting for room")
        assert texts(pilot, Notice) == ["m needs 5 GB and n keeps 4 GB (busy); wait until it is idle."]
        gate.set()
        await wait_until(pilot, lambda: header.state_text == "ready")
        assert texts(pilot, Notice) == []


async def test_enter_sends_and_ctrl_j_breaks_the_line() -> None:
    client = FakeClient(["ok"])
    async with ChatApp(client, "m").run_test() as pilot:
        await pilot.press("a", "ctrl+j", "b", "shift+enter", "c", "enter")
        await wait_until(pilot, lambda: client.num_closed == 1)
        assert client.requests[0][-1]["content"] == "a\nb\nc"


async def test_keys_that_come_in_a_burst_keep_their_order() -> None:
    client = FakeClient(["ok"])
    async with ChatApp(client, "m").run_test() as pilot:
        for key, character in (("a", "a"), ("ctrl+j", None), ("b", "b"), ("enter", None)):
            pilot.app.post_message(events.Key(key, character))
        await wait_until(pilot, lambda: client.num_closed == 1)
        assert client.requests[0][-1]["content"] == "a\nb"


async def test_commands() -> None:
    client = FakeClient()
    app = ChatApp(client, "m")
    async with app.run_test() as pilot:
        await ask(pilot, "/help")
        await wait_until(pilot, lambda: any("/clear" in text for text in texts(pilot, Notice)))
        await ask(pilot, "/nonsense")
        await wait_until(pilot, lambda: "no command /nonsense" in pilot.app.screen.query_one(StatusLine).message)
        assert pilot.app.screen.query_one(PromptInput).text == "/nonsense"
        await ask(pilot, "   ")
        await ask(pilot, "/bye")
        await wait_until(pilot, lambda: not app.is_running)
    assert client.requests == []


async def test_ctrl_c_twice_leaves_and_once_does_not() -> None:
    app = ChatApp(FakeClient(), "m")
    async with app.run_test() as pilot:
        await pilot.press("ctrl+c")
        assert "again" in pilot.app.screen.query_one(StatusLine).message
        assert app.is_running
        await pilot.press("ctrl+c")
        await wait_until(pilot, lambda: not app.is_running)


async def test_leaving_in_the_middle_of_an_answer_closes_the_stream() -> None:
    client = FakeClient(["Half", asyncio.Event()])
    async with ChatApp(client, "m").run_test() as pilot:
        await ask(pilot, "Go")
        await wait_until(pilot, lambda: texts(pilot, AssistantMessage) == ["Half"])
        await pilot.press("ctrl+q")
    assert client.num_closed == 1


@pytest.mark.parametrize(
    "text",
    [
        "Look:\n\n```python\nx = 1\n```\n\nDone.",
        "```python\nfor i in range(3):\n    print(i)",
        "# Title\n\n- a\n- b\n\n1. c\n2. d\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\nEnd",
        "Paragraph with `code`\n\n    indented code\n\n> quote\n> more\n\nlast",
    ],
)
async def test_streamed_markdown_ends_as_if_it_had_come_at_once(text: str) -> None:
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    script: list[str | ClientError | asyncio.Event] = []
    gates: list[asyncio.Event] = []
    for piece in pieces:
        gate = asyncio.Event()
        gates.append(gate)
        script += [piece, gate]
    client = FakeClient(script, [text])
    async with ChatApp(client, "m").run_test() as pilot:
        await ask(pilot, "slowly")
        await wait_until(pilot, lambda: len(client.requests) == 1)
        for gate in gates:
            gate.set()
            await pilot.pause()
        await wait_until(pilot, lambda: not screen_of(pilot).is_answering)
        await pilot.app.workers.wait_for_complete()
        await ask_and_wait(pilot, "at once", client)
        slow, fast = pilot.app.screen.query(AssistantMessage)
        assert [repr_block(b) for b in slow.query(MarkdownBlock)] == [repr_block(b) for b in fast.query(MarkdownBlock)]


def repr_block(block: MarkdownBlock) -> tuple[str, str, str]:
    code = block.code if isinstance(block, MarkdownFence) else ""
    return type(block).__name__, block._content.plain, code


async def test_code_is_plain_while_it_grows_and_highlighted_at_the_end() -> None:
    gate = asyncio.Event()
    client = FakeClient(["```python\nx = 1\n", gate, "y = 2\n```\n"])
    async with ChatApp(client, "m").run_test() as pilot:
        await ask(pilot, "code")
        await wait_until(pilot, lambda: bool(pilot.app.screen.query(PlainFence)))
        gate.set()
        await wait_until(pilot, lambda: not screen_of(pilot).is_answering)
        await pilot.app.workers.wait_for_complete()
        (fence,) = pilot.app.screen.query(MarkdownFence)
        assert not isinstance(fence, PlainFence)
        assert fence.code == "x = 1\ny = 2"
        assert fence._highlighted_code.spans


async def test_the_transcript_follows_its_end_until_the_user_scrolls_up() -> None:
    paragraphs = "\n\n".join(f"Paragraph {i}." for i in range(60))
    gate = asyncio.Event()
    client = FakeClient([paragraphs, gate, "\n\n" + paragraphs], ["short"])
    async with ChatApp(client, "m").run_test(size=(80, 24)) as pilot:
        transcript = pilot.app.screen.query_one(Transcript)
        await ask(pilot, "long")
        await wait_until(pilot, lambda: transcript.max_scroll_y > 60 and transcript.is_vertical_scroll_end)
        await pilot.press("pageup")
        await wait_until(pilot, lambda: not transcript.is_vertical_scroll_end)
        await pilot.pause(0.3)
        position, height = transcript.scroll_y, transcript.max_scroll_y
        gate.set()
        await wait_until(pilot, lambda: transcript.max_scroll_y > height + 60)
        assert transcript.scroll_y == position
        await wait_until(pilot, lambda: not screen_of(pilot).is_answering)
        await ask_and_wait(pilot, "next", client)
        await wait_until(pilot, lambda: transcript.is_vertical_scroll_end)


async def test_old_answers_become_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.widgets.transcript.LIVE_ANSWERS", 2)
    client = FakeClient(*[[f"Answer **{i}**"] for i in range(4)])
    async with ChatApp(client, "m").run_test() as pilot:
        for i in range(4):
            await ask_and_wait(pilot, str(i), client)
        assert [answer.is_settled for answer in pilot.app.screen.query(AssistantMessage)] == [True, True, False, False]
        assert texts(pilot, AssistantMessage)[0] == "Answer **0**"


async def test_the_prompt_is_never_read_as_markup() -> None:
    client = FakeClient(["[bold]not markup[/bold] [/]"])
    async with ChatApp(client, "weird[model]").run_test() as pilot:
        await ask_and_wait(pilot, "[red]x[/] [", client)
        assert texts(pilot, UserMessage) == ["[red]x[/] ["]


async def test_a_conversation_is_one_saved_chat_and_clear_begins_another() -> None:
    client = FakeClient(["One."], ["Two."], ["Three."])
    async with ChatApp(client, "m").run_test() as pilot:
        await ask_and_wait(pilot, "1?", client)
        await ask_and_wait(pilot, "2?", client)
        await ask(pilot, "/clear")
        await wait_until(pilot, lambda: not pilot.app.screen.query(AssistantMessage))
        await ask_and_wait(pilot, "3?", client)
    assert client.chat_ids == ["new1", "new1", "new2"]


async def test_a_resumed_chat_shows_what_was_said_and_goes_on() -> None:
    client = FakeClient(["Three."])
    resumed = saved_chat("old", "Be brief.", "1?", "One.", "2?", roles=("system", "user", "assistant", "user"))
    async with ChatApp(client, "m", resumed=resumed).run_test() as pilot:
        prompt_input = pilot.app.screen.query_one(PromptInput)
        await wait_until(pilot, lambda: prompt_input.text == "2?")
        assert texts(pilot, UserMessage) == ["1?"]
        assert texts(pilot, AssistantMessage) == ["One."]
        assert "Title [old" in pilot.app.screen.query_one(StatusLine).message
        await pilot.press("enter")
        await wait_until(pilot, lambda: client.num_closed == 1 and not screen_of(pilot).is_answering)
    assert client.chat_ids == ["old"]
    assert [message["content"] for message in client.requests[0]] == ["Be brief.", "1?", "One.", "2?"]
    assert client.requests[0][0]["role"] == "system"


async def test_a_system_message_of_the_command_line_goes_before_the_saved_one() -> None:
    client = FakeClient(["Yes."])
    app = ChatApp(client, "m", system="Now in French.", resumed=saved_chat("old", "1?", "One."))
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: texts(pilot, AssistantMessage) == ["One."])
        await ask_and_wait(pilot, "2?", client)
    assert [message["content"] for message in client.requests[0]] == ["Now in French.", "1?", "One.", "2?"]


async def test_history_opens_a_saved_chat_and_escape_leaves_it_closed() -> None:
    client = FakeClient(["One."], ["Two."])
    client.chats.saved = {key: saved_chat(key, f"{key}?", f"{key}!") for key in ("first", "second")}
    async with ChatApp(client, "m").run_test() as pilot:
        await ask_and_wait(pilot, "1?", client)
        for keys, shown in ((["escape"], ["1?"]), (["down", "enter"], ["second?"])):
            await ask(pilot, "/history")
            await wait_until(pilot, lambda: isinstance(pilot.app.screen, HistoryScreen))
            options = pilot.app.screen.query_one(OptionList)
            assert "Title [first" in str(options.get_option_at_index(0).prompt)
            await pilot.press(*keys)
            await wait_until(pilot, lambda: isinstance(pilot.app.screen, ChatScreen))
            await wait_until(pilot, lambda shown=shown: texts(pilot, UserMessage) == shown)  # type: ignore[misc]
        assert texts(pilot, AssistantMessage) == ["second!"]
        await ask_and_wait(pilot, "2?", client)
    assert client.chat_ids == ["new1", "second"]
    assert [message["content"] for message in client.requests[1]] == ["second?", "second!", "2?"]


async def test_history_without_chats_says_so() -> None:
    async with ChatApp(FakeClient(), "m").run_test() as pilot:
        await ask(pilot, "/history")
        await wait_until(pilot, lambda: "no saved chats" in pilot.app.screen.query_one(StatusLine).message)


@pytest.mark.parametrize(("code", "num_notices"), [("chats_off", 0), ("database_unusable", 1)])
async def test_talking_goes_on_when_saving_does_not(code: str, num_notices: int) -> None:
    client = FakeClient(["One."], ["Two."])
    client.chats.error = ClientError(500, code, "The database cannot be used (disk full); free some space.")
    async with ChatApp(client, "m").run_test() as pilot:
        await ask_and_wait(pilot, "1?", client)
        await ask_and_wait(pilot, "2?", client)
        assert len(texts(pilot, Notice)) == num_notices
    assert client.chat_ids == [None, None]


async def test_a_chat_that_was_deleted_meanwhile_becomes_a_new_one() -> None:
    client = FakeClient(["One."], [ClientError(404, "chat_not_found", "Gone.")], ["Two."], ["Three."])
    async with ChatApp(client, "m").run_test() as pilot:
        await ask_and_wait(pilot, "1?", client)
        await ask(pilot, "2?")
        await wait_until(pilot, lambda: texts(pilot, AssistantMessage) == ["One.", "Two."])
        await wait_until(pilot, lambda: not screen_of(pilot).is_answering)
        assert len(texts(pilot, Notice)) == 1
        await ask_and_wait(pilot, "3?", client)
    assert client.chat_ids == ["new1", "new1", None, "new2"]
    assert [message["content"] for message in client.requests[-1]] == ["1?", "One.", "2?", "Two.", "3?"]
