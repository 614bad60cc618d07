"""What is said in one chat: `Conversation` (for the model) and `PromptHistory` (for the arrow keys).

Plain values without a terminal; the chat screen owns one of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.schema.chats import ChatMessageEntry


class Conversation:
    """The messages of one chat, alternating user and assistant after an optional system message."""

    def __init__(self, system: str | None = None) -> None:
        self._system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages as the chat route takes them."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns]

    def restore(self, messages: Sequence[ChatMessageEntry]) -> str:
        """Go on with a saved conversation; returns the question that it awaits, which is to be asked again.

        Its system message holds where this one has none of its own.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        if turns and turns[0]["role"] == "system":
            self._system = self._system or turns[0]["content"]
            del turns[0]
        awaited = turns.pop()["content"] if turns and turns[-1]["role"] == "user" else ""
        self._turns = turns
        return awaited

    def ask(self, prompt: str) -> None:
        """Add the user's turn."""
        self._turns.append({"role": "user", "content": prompt})

    def answer(self, text: str) -> None:
        """Close the last turn with what the model said; with no text the question is taken back.

        A question without an answer must not stay: two user messages in a row are an error in
        many chat templates.
        """
        assert self._turns and self._turns[-1]["role"] == "user"
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()


class PromptHistory:
    """Prompts sent so far, walked with `older` and `newer`; the unsent draft waits at the end."""

    def __init__(self) -> None:
        self._prompts: list[str] = []
        self._position = 0
        self._draft = ""

    def add(self, prompt: str) -> None:
        """Remember a sent prompt and go back to the end; a repetition is kept once."""
        if not self._prompts or self._prompts[-1] != prompt:
            self._prompts.append(prompt)
        self._position = len(self._prompts)
        self._draft = ""

    def older(self, current: str) -> str | None:
        """The prompt before the one shown, None at the oldest; `current` is what the input holds now."""
        if self._position == 0:
            return None
        if self._position == len(self._prompts):
            self._draft = current
        self._position -= 1
        return self._prompts[self._position]

    def newer(self) -> str | None:
        """The prompt after the one shown, at last the draft; None when the draft is shown already."""
        if self._position == len(self._prompts):
            return None
        self._position += 1
        return self._draft if self._position == len(self._prompts) else self._prompts[self._position]
