"""`LiveMarkdown`: Markdown that grows while a model writes it.

Text is only ever appended while the answer runs: Textual 8.2 loses an open fence when `append`
follows `update`.  Appends are paced to a share of one core, since the model may need the cores
too; `Markdown.get_stream` would append as often as it can.  Code is not highlighted while it
grows: highlighting costs time in proportion to the whole fence on each append.  Used by
`tui.widgets.message`; knows nothing of chats.
"""

from __future__ import annotations

import asyncio
import time

from textual.content import Content
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

FLUSH_INTERVAL_S = 0.1
MAX_RENDER_SHARE = 0.25


class PlainFence(MarkdownFence):
    """A code fence without syntax highlighting."""

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        return Content(code)


class LiveMarkdown(Markdown):
    """Once mounting has been awaited, call `feed` for each piece of text, then `finish` once."""

    def __init__(self) -> None:
        super().__init__("")
        self._pending_text: list[str] = []
        self._has_pending = asyncio.Event()
        self._finishing = asyncio.Event()
        self._feeder: asyncio.Task[None] | None = None

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        if block_name in ("fence", "code_block") and not self._finishing.is_set():
            return PlainFence
        return super().get_block_class(block_name)

    def on_unmount(self) -> None:
        if self._feeder is not None:
            self._feeder.cancel()

    def feed(self, text: str) -> None:
        """Queue text; it appears within about `FLUSH_INTERVAL_S`, later when rendering is slow."""
        if text:
            self._pending_text.append(text)
            self._has_pending.set()
            if self._feeder is None:
                self._feeder = asyncio.create_task(self._append_pending())

    async def finish(self) -> None:
        """Show all that was fed and highlight the code; nothing may be fed afterwards."""
        if self._feeder is None or self._finishing.is_set():
            return
        self._finishing.set()
        self._has_pending.set()
        await asyncio.wait([self._feeder])
        if not self._feeder.cancelled():
            self._feeder.result()
        if self.is_attached and self.query(PlainFence):
            await self.update(self.source)

    async def _append_pending(self) -> None:
        while not self._finishing.is_set() or self._pending_text:
            await self._has_pending.wait()
            self._has_pending.clear()
            text = "".join(self._pending_text)
            self._pending_text.clear()
            start_s = time.perf_counter()
            if text:
                await self.append(text)
            cost_s = time.perf_counter() - start_s
            await self._pause(max(FLUSH_INTERVAL_S, cost_s / MAX_RENDER_SHARE))

    async def _pause(self, duration_s: float) -> None:
        """Wait, but not once the text is complete."""
        try:
            await asyncio.wait_for(self._finishing.wait(), duration_s)
        except TimeoutError:
            return
