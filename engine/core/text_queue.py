"""`TextQueue`: whole texts that wait for an encoder, and which of them the next step takes.

The counterpart of the scheduler for models that read a text at once: no cache, no rows, nothing that lasts longer
than a step.  Knows no torch.  Driven by `engine.encoder_loop`.
"""

from __future__ import annotations

from collections import OrderedDict

from engine.api.errors import ContextLengthExceeded, InvalidParameter
from engine.api.request import Prompt


class TextQueue:
    """Texts in the order of their arrival.

    A step has at most `max_num_tokens` tokens, which the longest text must not exceed, and `max_num_texts` texts.
    """

    def __init__(self, *, max_num_tokens: int, max_num_texts: int, max_model_len: int) -> None:
        assert max_model_len <= max_num_tokens, "a step must hold the longest text"
        self._max_num_tokens = max_num_tokens
        self._max_num_texts = max_num_texts
        self._max_model_len = max_model_len
        # Unlike a dict, it does not step over what was taken from its front before.
        self._waiting: OrderedDict[int, Prompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._waiting

    def add(self, prompt: Prompt) -> None:
        """Queue a text.  Raises `ContextLengthExceeded` if it is too long, and `InvalidParameter` if it is empty."""
        num_tokens = len(prompt.token_ids)
        if num_tokens == 0:
            raise InvalidParameter("input", "The text has no tokens; send at least one.")
        if num_tokens > self._max_model_len:
            raise ContextLengthExceeded(num_tokens, self._max_model_len, param="input")
        self._waiting[prompt.sequence_id] = prompt

    def remove(self, sequence_id: int) -> bool:
        """Forget a text; false if it does not wait (any more)."""
        return self._waiting.pop(sequence_id, None) is not None

    def take(self) -> list[Prompt]:
        """The texts of the next step, those that wait longest: as many as fit, and one at least if any waits."""
        taken: list[Prompt] = []
        num_left = self._max_num_tokens
        for prompt in self._waiting.values():
            num_left -= len(prompt.token_ids)
            if num_left < 0 or len(taken) == self._max_num_texts:
                break
            taken.append(prompt)
        for prompt in taken:
            del self._waiting[prompt.sequence_id]
        return taken

    def clear(self) -> list[Prompt]:
        """Forget all texts; returns them."""
        forgotten = list(self._waiting.values())
        self._waiting.clear()
        return forgotten
