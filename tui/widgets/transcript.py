"""`Transcript`: the scrolling list of messages; stays at its end unless the user scrolled up.

Used by `tui.screens.chat`.
"""

from __future__ import annotations

from textual.containers import VerticalScroll
from textual.widget import Widget

from tui.widgets.message import AssistantMessage

# A Markdown answer is tens of widgets, and each append lays out all of them again: with 50
# answers above, that alone takes 60 ms.
LIVE_ANSWERS = 20


class Transcript(VerticalScroll, can_focus=False):
    """Messages from old to new."""

    def on_mount(self) -> None:
        self.anchor()

    async def add(self, message: Widget) -> None:
        """Show a new message at the end."""
        await self.mount(message)

    async def settle_old_answers(self) -> None:
        """Simplify the answers that are far above."""
        answers = [answer for answer in self.query(AssistantMessage) if not answer.is_settled]
        for answer in answers[:-LIVE_ANSWERS]:
            await answer.settle()

    async def clear(self) -> None:
        """Remove every message."""
        await self.remove_children()
        self.anchor()
