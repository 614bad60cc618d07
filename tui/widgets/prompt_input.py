"""`PromptInput`: where prompts are typed; Enter sends, Up and Down walk through earlier prompts.

It never clears itself: whoever handles `Submitted` calls `accept` once the prompt is on its
way, so a prompt that cannot be sent now stays where it is.  Used by `tui.screens.chat`.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from tui.conversation import PromptHistory

# Terminals without the Kitty keyboard protocol send the same byte for Shift+Enter and Enter,
# hence the second chord.
NEWLINE_KEYS = ("shift+enter", "ctrl+j")


class PromptInput(TextArea):
    """A text area that grows with its text up to the limit in the style sheet."""

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
        # Not bindings: those run after the key has bubbled, when the keys behind it in a fast
        # burst are already in the text.
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            if self.text.strip():
                self.post_message(self.Submitted(self.text.strip()))
        elif event.key in NEWLINE_KEYS:
            event.stop()
            event.prevent_default()
            self.replace("\n", *self.selection, maintain_selection_offset=False)
        else:
            await super()._on_key(event)

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
