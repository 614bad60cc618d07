"""Find stop strings in text that arrives in pieces, and hold back what may become one.

An Aho-Corasick automaton over all stop strings (Aho and Corasick, "Efficient string matching",
1975): its state after each character is the longest suffix of the text that begins some stop
string, which is exactly the part that must not be shown yet.  The search costs amortised
constant time per character, however many and long the stop strings are.  Knows text only;
used by `engine.text.sequence_text`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The first stop string to be completed wins; of several completed by one character, the longest.

    So the outcome does not depend on how the text was cut into pieces.  `matched` is the stop
    string found, None until then.  With no stop strings all text passes straight through.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._include_in_output = include_in_output
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fallback = self._link()
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is safe to show; after a match that is always ""."""
        if self.matched is not None:
            return ""
        state, goto, fallback = self._state, self._next, self._fallback
        for position, character in enumerate(text, start=1):
            while state and character not in goto[state]:
                state = fallback[state]
            state = goto[state].get(character, 0)
            found = self._found[state]
            if found is not None:
                return self._finish(found, self._held + text[:position])
        self._state = state
        visible = self._held + text
        cut = len(visible) - self._depth[state]
        self._held = visible[cut:]
        return visible[:cut]

    def flush(self) -> str:
        """Return what is still held back; call once, when no more text can come."""
        held, self._held = self._held, ""
        return held

    def _finish(self, found: str, text: str) -> str:
        self.matched = found
        self._held = ""
        return text if self._include_in_output else text[: len(text) - len(found)]

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = following
        self._found[state] = stop

    def _link(self) -> list[int]:
        """Return each state's fallback: the state of its longest proper suffix that begins a stop string."""
        fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                candidate = fallback[state]
                while candidate and character not in self._next[candidate]:
                    candidate = fallback[candidate]
                fallback[following] = self._next[candidate].get(character, 0)
                if self._found[following] is None:
                    self._found[following] = self._found[fallback[following]]
                queue.append(following)
        return fallback
