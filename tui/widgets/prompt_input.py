"""`PromptInput`: where prompts are typed; Enter sends, Up and Down walk through earlier prompts.

It never clears itself: whoever handles `Submitted` calls `accept` once the prompt is on its
way, so a prompt that cannot be sent now stays where it is.  Used by `tui.screens.chat`.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.widgets import TextArea

from tui.conversation import PromptHistory


class PromptInput(TextArea):
    """A text area that grows with its text up to the limit in the style sheet."""

    # Terminals without the Kitty keyboard protocol send the same byte for Shift+Enter and
    # Enter, hence the second chord.
    BINDINGS = [Binding("shift+enter,ctrl+j", "newline", "New line", show=False, id="prompt.newline")]

    @dataclass
    class Submitted(Message):
        """The user wants to send `text`, which is not blank."""

        text: str

    def __init__(self, placeholder: str) -> None:
        super().__init__(placeholder=placeholder, compact=True, highlight_cursor_line=False, soft_wrap=True)
        self._history = PromptHistory()

    def accept(self, prompt: str) -> None:
        """Remember the prompt and empty the input."""
        self._history.add(prompt)
        self.text = ""

    async def _on_key(self, event: events.Key) -> None:
        if event.key != "enter":
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()
        if self.text.strip():
            self.post_message(self.Submitted(self.text.strip()))

    def action_newline(self) -> None:
        self.insert("\n")

    def action_cursor_up(self, select: bool = False) -> None:
        if not select and self.navigator.is_first_wrapped_line(self.cursor_location):
            self._recall(self._history.older(self.text))
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if not select and self.navigator.is_last_wrapped_line(self.cursor_location):
            self._recall(self._history.newer())
        else:
            super().action_cursor_down(select)

    def _recall(self, prompt: str | None) -> None:
        if prompt is not None:
            self.text = prompt
            self.move_cursor(self.document.end)
