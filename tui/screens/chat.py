"""`ChatScreen`: one conversation with one model.

Owns the conversation, sends prompts through a `ChatClient` and shows what comes back.  Knows
no HTTP and no store; `tui.app` pushes it.
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
from tui.commands import HELP, Command, UnknownCommand, parse_command
from tui.conversation import Conversation
from tui.widgets.message import AssistantMessage, Notice, UserMessage
from tui.widgets.prompt_input import PromptInput
from tui.widgets.status import HeaderLine, State, StatusLine, format_progress
from tui.widgets.transcript import Transcript

QUIT_WINDOW_S = 2.0
IDLE_KEYS = "Enter send · /help"
ANSWERING_KEYS = "Esc stop"


class ChatClient(Protocol):
    """The part of `app.client.QuireClient` that a chat needs."""

    def chat(
        self, messages: Sequence[dict[str, Any]], model: str, **params: Any
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
        self, client: ChatClient, model: str, *, system: str | None = None, params: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self._client = client
        self._model = model
        self._params = dict(params or {})
        self._conversation = Conversation(system)
        self._is_answering = False
        self._interrupted_at_s = float("-inf")

    def compose(self) -> ComposeResult:
        yield HeaderLine(self._model)
        yield Transcript()
        yield StatusLine()
        yield PromptInput(placeholder=f"Ask {self._model} something")

    def on_mount(self) -> None:
        self.query_one(PromptInput).focus()
        self.query_one(StatusLine).show_keys(IDLE_KEYS)
        self._load_model()

    @property
    def is_answering(self) -> bool:
        """Whether an answer is running; one at a time."""
        return self._is_answering

    @work(group="load", exclusive=True)
    async def _load_model(self) -> None:
        self._show_state(State.LOADING)
        try:
            async with aclosing(self._client.load(self._model)) as events:
                async for progress in events:
                    self._show_state(State.LOADING, format_progress(progress))
        except ClientError as error:
            self._show_state(State.FAILED, "not loaded")
            # An answer that waits for the model fails for the same reason and says so itself.
            if not self._is_answering:
                await self._transcript.add(Notice(error.message, "error"))
            return
        if self.query_one(HeaderLine).state is State.LOADING:
            self._show_state(State.WAITING if self._is_answering else State.READY)

    @on(PromptInput.Submitted)
    async def _send(self, event: PromptInput.Submitted) -> None:
        prompt_input = self.query_one(PromptInput)
        try:
            command = parse_command(event.text)
        except UnknownCommand as error:
            self._status.show_message(str(error))
            return
        if self._is_answering and command in (None, Command.CLEAR):
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
                self._conversation.clear()
                await self._transcript.clear()
                self._status.show_message("")

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
        self._show_state(State.WAITING)
        self._status.show_message("")
        async with aclosing(self._client.chat(self._conversation.messages, self._model, **self._params)) as events:
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
