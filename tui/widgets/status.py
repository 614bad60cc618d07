"""The header line (model and state) and the status line (numbers of the last answer, keys).

Used by `tui.screens.chat`; the formatting is pure.
"""

from __future__ import annotations

from enum import StrEnum

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Static

from app.schema.admin import ProgressLine


class State(StrEnum):
    """What the model is doing; the value is also the CSS class of the header's dot."""

    READY = "ready"
    LOADING = "loading"
    WAITING = "waiting"
    ANSWERING = "answering"
    FAILED = "failed"


class HeaderLine(Horizontal):
    """`Quire  MODEL ... ● state`."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self._state = Static(id="state")
        self.state = State.READY
        self.state_text = ""

    def compose(self) -> ComposeResult:
        yield Static("Quire", id="product")
        yield Static(self._model, id="model", markup=False)
        yield self._state

    def show_state(self, state: State, text: str | None = None) -> None:
        """Show `state`, in the words of `text` if given."""
        self.state = state
        self.state_text = text or state.value
        self._state.update(f"● {self.state_text}")
        self._state.set_classes(f"-{state.value}")


class StatusLine(Horizontal):
    """Left: a message or the numbers of the last answer.  Right: the keys that matter now."""

    def __init__(self) -> None:
        super().__init__()
        self._message = Static(id="status-message", markup=False)
        self._keys = Static(id="status-keys", markup=False)
        self.message = ""

    def compose(self) -> ComposeResult:
        yield self._message
        yield self._keys

    def show_message(self, text: str) -> None:
        self.message = text
        self._message.update(text)

    def show_keys(self, text: str) -> None:
        self._keys.update(text)


def format_progress(progress: ProgressLine) -> str:
    """`loading weights 45 %`."""
    if progress.total > 0:
        return f"{progress.status} {100 * progress.completed // progress.total} %"
    return progress.status
