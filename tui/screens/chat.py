"""`ChatScreen`: one conversation with one model.

Owns the conversation, sends prompts through a `ChatClient`, which also saves them, and shows what comes
back.  Knows no HTTP and no store; `tui.app` pushes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen

from app.client import ChatEvent, ChatFinished, ClientError, TextDelta
from app.schema.admin import ProgressLine
from app.schema.chats import ChatDetails
from tui.commands import HELP, Command, UnknownCommand, parse_command
from tui.conversation import Conversation
from tui.saving import ChatRecords, SavedChat
from tui.screens.history import HistoryScreen
from tui.widgets.message import AssistantMessage, Notice, UserMessage
from tui.widgets.prompt_input import PromptInput
from tui.widgets.status import HeaderLine, State, StatusLine, format_progress
from tui.widgets.transcript import Transcript

QUIT_WINDOW_S = 2.0
EXPLAINED_AFTER_S = 0.3
"""A model in memory has often answered by then."""
IDLE_KEYS = "Enter send · /help"
ANSWERING_KEYS = "Esc stop"


class ChatClient(Protocol):
    """The part of `app.client.QuireClient` that a chat needs."""

    @property
    def chats(self) -> ChatRecords: ...

    def chat(
        self, messages: Sequence[dict[str, Any]], model: str, *, chat_id: str | None = None, **params: Any
    ) -> AsyncGenerator[ChatEvent, None]: ...

    def load(self, model: str) -> AsyncGenerator[ProgressLine, None]: ...


class ChatScreen(Screen[None]):
    """Header, transcript, status, input."""

    BINDINGS = [
        Binding("escape", "stop_answer", "Stop", show=False, priority=True, id="chat.stop"),
        Binding("ctrl+c", "copy_stop_or_quit", "Copy, stop or quit", show=False, priority=True, id="chat.interrupt"),
        Binding("pageup", "scroll_transcript(-1)", "Scroll up", show=False, priority=True, id="chat.scroll_up"),
        Binding("pagedown", "scroll_transcript(1)", "Scroll down", show=False, priority=True, id="chat.scroll_down"),
    ]

    def __init__(
        self,
        client: ChatClient,
        model: str,
        *,
        system: str | None = None,
        params: Mapping[str, Any] | None = None,
        resumed: ChatDetails | None = None,
    ) -> None:
        super().__init__()
        self._client = client
        self._model = model
        self._params = dict(params or {})
        self._system = system
        self._resumed = resumed
        self._conversation = Conversation(system)
        self._saved = SavedChat(client.chats, model)
        self._is_answering = False
        self._is_loading = False
        self._why_waiting = Notice("")
        self._interrupted_at_s = float("-inf")

    def compose(self) -> ComposeResult:
        yield HeaderLine(self._model)
        yield Transcript()
        yield StatusLine()
        yield PromptInput(placeholder=f"Ask {self._model} something")

    async def on_mount(self) -> None:
        self.query_one(PromptInput).focus()
        self.query_one(StatusLine).show_keys(IDLE_KEYS)
        self._show_state(State.LOADING)
        self._load_model(tells_failure=True)
        if self._resumed is not None:
            await self._show_chat(self._resumed, self._system)

    @property
    def is_answering(self) -> bool:
        """Whether an answer is running; one at a time."""
        return self._is_answering

    @work(group="load", exclusive=True)
    async def _load_model(self, *, tells_failure: bool) -> None:
        """Bring the model into memory, which takes no time where it is there, and show how that goes."""
        self._is_loading = True
        try:
            async with aclosing(self._client.load(self._model)) as events:
                async for progress in events:
                    await self._show_loading(progress)
        except ClientError as error:
            self._show_state(State.FAILED, "not loaded")
            # An answer that waits for the model fails for the same reason and says so itself.
            if tells_failure and not self._is_answering:
                await self._transcript.add(Notice(error.message, "error"))
            return
        finally:
            self._is_loading = False
            if self._why_waiting.is_attached:
                await self._why_waiting.remove()
        if self.query_one(HeaderLine).state is State.LOADING:
            self._show_state(State.WAITING if self._is_answering else State.READY)

    @work(group="explain", exclusive=True)
    async def _explain_wait(self) -> None:
        """A model that left or fell asleep meanwhile takes its time to come back: show how it does."""
        await asyncio.sleep(EXPLAINED_AFTER_S)
        if self.query_one(HeaderLine).state is State.WAITING:
            self._load_model(tells_failure=False)

    async def _show_loading(self, progress: ProgressLine) -> None:
        """A stage in the header; a whole sentence, about what stands in the way, has room in the transcript alone."""
        text = format_progress(progress)
        is_sentence = text.endswith(".")
        self._show_state(State.LOADING, "waiting for room" if is_sentence else text)
        if is_sentence and self._why_waiting.is_attached:
            self._why_waiting.rewrite(text)
        elif is_sentence:
            self._why_waiting = Notice(text)
            await self._transcript.add(self._why_waiting)
        elif self._why_waiting.is_attached:
            await self._why_waiting.remove()

    @on(PromptInput.Submitted)
    async def _send(self, event: PromptInput.Submitted) -> None:
        prompt_input = self.query_one(PromptInput)
        try:
            command = parse_command(event.text)
        except UnknownCommand as error:
            self._status.show_message(str(error))
            return
        if self._is_answering and command in (None, Command.CLEAR, Command.HISTORY):
            self._status.show_message("Still answering; your text stays here. Esc stops the answer.")
        elif command is not None:
            prompt_input.accept(event.text)
            await self._run_command(command)
        else:
            prompt_input.accept(event.text)
            self._answer(event.text)

    async def _run_command(self, command: Command) -> None:
        match command:
            case Command.BYE:
                self.app.exit()
            case Command.HELP:
                await self._transcript.add(Notice(HELP))
            case Command.CLEAR:
                self._conversation = Conversation(self._system)
                self._saved.begin_anew()
                await self._transcript.clear()
                self._status.show_message("")
            case Command.HISTORY:
                self._choose_chat()

    @work(group="history", exclusive=True)
    async def _choose_chat(self) -> None:
        """Let the user pick one of the saved chats, and show it in place of this one."""
        try:
            chats = await self._client.chats.list()
            if not chats:
                self._status.show_message("There are no saved chats yet.")
                return
            chat_id = await self.app.push_screen_wait(HistoryScreen(chats))
            if chat_id is not None:
                await self._show_chat(await self._client.chats.get(chat_id), None)
        except ClientError as error:
            await self._transcript.add(Notice(error.message, "error"))

    async def _show_chat(self, details: ChatDetails, system: str | None) -> None:
        """Go on with a saved chat; a question that was never answered waits in the input.

        `system` takes the place of the chat's own system message.
        """
        self._conversation = Conversation(system)
        awaited = self._conversation.restore(details.messages)
        self._saved.resume(details.chat.id)
        await self._transcript.clear()
        for message in self._conversation.messages:
            match message["role"]:
                case "user":
                    await self._transcript.add(UserMessage(message["content"]))
                case "assistant":
                    await self._transcript.add(AssistantMessage(message["content"]))
        self._transcript.anchor()
        if awaited:
            self.query_one(PromptInput).text = awaited
        self._status.show_message(f"Going on with: {details.chat.title}")

    @work(group="answer")
    async def _answer(self, prompt: str) -> None:
        """One turn, from the prompt to the end of its answer, whichever end that is."""
        self._set_answering(True)
        self._conversation.ask(prompt)
        message = AssistantMessage()
        state = State.READY
        try:
            await self._transcript.add(UserMessage(prompt))
            await self._transcript.add(message)
            self._transcript.anchor()
            await self._stream_into(message)
        except ClientError as error:
            state = State.FAILED
            await self._show_failure(error, message)
        except asyncio.CancelledError:
            self._status.show_message("Stopped; what came so far is kept." if message.text else "Stopped.")
            raise
        finally:
            self._conversation.answer(message.text)
            self._set_answering(False)
            if self.is_attached:
                self._show_state(state)
                await message.finish()
                await self._transcript.settle_old_answers()

    async def _stream_into(self, message: AssistantMessage) -> None:
        """Show the answer while the daemon saves it; one that cannot be saved is shown all the same."""
        if not self._is_loading:
            self._show_state(State.WAITING)
            self._explain_wait()
        self._status.show_message("")
        try:
            await self._stream_turn(message, await self._saved.id())
        except ClientError as error:
            explanation = None if message.text else self._saved.explain(error)
            if explanation is None:
                raise
            if explanation:
                await self._transcript.add(Notice(explanation, "error"))
            await self._stream_turn(message, None)

    async def _stream_turn(self, message: AssistantMessage, chat_id: str | None) -> None:
        answer = self._client.chat(self._conversation.messages, self._model, chat_id=chat_id, **self._params)
        async with aclosing(answer) as events:
            async for event in events:
                match event:
                    case TextDelta(text):
                        if not message.text:
                            self._show_state(State.ANSWERING)
                        message.feed(text)
                    case ChatFinished():
                        self._status.show_message(event.summary())

    async def _show_failure(self, error: ClientError, message: AssistantMessage) -> None:
        await message.finish()
        if not message.text:
            await message.remove()
        await self._transcript.add(Notice(f"{error.message} Up recalls your prompt.", "error"))

    def action_stop_answer(self) -> None:
        if self._is_answering:
            self.workers.cancel_group(self, "answer")

    def action_copy_stop_or_quit(self) -> None:
        """Ctrl+C: copy what is selected; else stop the answer; pressed twice in a row, quit."""
        prompt_input = self.query_one(PromptInput)
        if (selected := self.get_selected_text() or prompt_input.selected_text) is not None and selected:
            self.app.copy_to_clipboard(selected)
            return
        now_s = time.monotonic()
        if now_s - self._interrupted_at_s < QUIT_WINDOW_S:
            self.app.exit()
            return
        self._interrupted_at_s = now_s
        self.action_stop_answer()
        self._status.show_message("Press Ctrl+C again to leave.")

    def action_scroll_transcript(self, pages: int) -> None:
        if pages < 0:
            self._transcript.scroll_page_up()
        else:
            self._transcript.scroll_page_down()

    def _set_answering(self, is_answering: bool) -> None:
        self._is_answering = is_answering
        if self.is_attached:
            self._status.show_keys(ANSWERING_KEYS if is_answering else IDLE_KEYS)

    def _show_state(self, state: State, text: str | None = None) -> None:
        self.query_one(HeaderLine).show_state(state, text)

    @property
    def _transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def _status(self) -> StatusLine:
        return self.query_one(StatusLine)
