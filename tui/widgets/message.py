"""The entries of the transcript: what the user said, what the model says, and notices.

Used by `tui.screens.chat`.
"""

from __future__ import annotations

from typing import Literal

from rich.markdown import Markdown as RichMarkdown
from textual.app import ComposeResult
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from tui.widgets.live_markdown import LiveMarkdown


class UserMessage(Static):
    """A prompt as it was typed; never parsed as markup."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(text))
        self.text = text


class Notice(Static):
    """A line from the chat itself: help, an error with its next step."""

    def __init__(self, text: str, kind: Literal["information", "error"] = "information") -> None:
        super().__init__(Content(text), classes=f"-{kind}")
        self.text = text

    def rewrite(self, text: str) -> None:
        self.update(Content(text))
        self.text = text


class AssistantMessage(Widget):
    """An answer: live Markdown while it runs and for a while after, one static block in the end.

    With a text, it is an answer of old and begins as that block.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._live = LiveMarkdown()
        self._parts = [text] if text else []
        self.is_settled = bool(text)

    @property
    def text(self) -> str:
        """All text so far, as the model wrote it."""
        return "".join(self._parts)

    def compose(self) -> ComposeResult:
        yield Static(RichMarkdown(self.text)) if self.is_settled else self._live

    def feed(self, text: str) -> None:
        """Add text to a running answer."""
        self._parts.append(text)
        self._live.feed(text)

    async def finish(self) -> None:
        """The answer is complete, or has ended early."""
        await self._live.finish()

    async def settle(self) -> None:
        """Replace the tree of Markdown widgets by one block, which costs nothing when others change."""
        if not self.is_settled:
            self.is_settled = True
            await self._live.remove()
            await self.mount(Static(RichMarkdown(self.text)))
