"""`ChatApp`: the terminal application around the chat screen.

Started by `quire run MODEL` in a terminal, on the event loop that the client lives on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.app import App

from app.schema.chats import ChatDetails
from tui.screens.chat import ChatClient, ChatScreen


class ChatApp(App[None]):
    """Shows one chat and ends with it; `resumed` is a saved one to go on with."""

    CSS_PATH = "style.tcss"
    TITLE = "Quire"

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
        self._chat = ChatScreen(client, model, system=system, params=params, resumed=resumed)

    def on_mount(self) -> None:
        self.push_screen(self._chat)
