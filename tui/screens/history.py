"""`HistoryScreen`: the saved chats as a list to choose from; ends with the id of the chosen one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from app.schema.chats import ChatEntry


class HistoryScreen(ModalScreen[str | None]):
    """Opened by `/history`; None when nothing was chosen."""

    BINDINGS = [Binding("escape", "dismiss", "Back", show=False, id="history.close")]

    def __init__(self, chats: Sequence[ChatEntry]) -> None:
        super().__init__()
        self._chats = chats

    def compose(self) -> ComposeResult:
        yield Static("Saved chats · Enter opens · Esc goes back", id="history-title")
        yield OptionList(*(Option(_line(chat), id=chat.id) for chat in self._chats), id="history-list")

    @on(OptionList.OptionSelected)
    def _choose(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


def _line(chat: ChatEntry) -> Content:
    """Date, title and model; never parsed as markup."""
    changed = datetime.fromisoformat(chat.updated_at).astimezone()
    return Content(f"{changed:%Y-%m-%d %H:%M}  {chat.title or 'untitled'}  ·  {chat.model}")
