"""Turn a growing list of token ids into text, one token at a time, without decoding twice.

A token is bytes, and text is the UTF-8 reading of all bytes so far, so the only state is the
unfinished character at the end: at most three bytes, held back until the next token completes
or breaks them.  Knows nothing of stop strings or requests.  Used by
`engine.text.sequence_text`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental `Tokenizer.decode`: all pieces and the flush joined equal the one-shot decode.

    With `continues_text` the space that a SentencePiece tokenizer drops from the beginning of
    a text is kept, because the output goes on where a prompt ended.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues_text: bool = False) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._whole_text = tokenizer.whole_text
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_open_character = False
        self._num_strippable = 0 if continues_text else tokenizer.num_stripped_spaces

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, "" where a character is still open."""
        if token_id in self._hidden:
            return ""
        text = None if self._has_open_character else self._whole_text(token_id)
        if text is None:
            text = self._decode(self._token_bytes(token_id))
        return self._strip(text) if self._num_strippable else text

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        if len(token_ids) == 1:
            return self.push(token_ids[0])
        hidden = self._hidden
        text = self._decode(b"".join([self._token_bytes(one) for one in token_ids if one not in hidden]))
        return self._strip(text) if self._num_strippable else text

    def flush(self) -> str:
        """Return U+FFFD for a character that never became whole, else ""; call once, at the end."""
        return self._decoder.decode(b"", True)

    def _decode(self, raw: bytes) -> str:
        text = self._decoder.decode(raw)
        self._has_open_character = bool(self._decoder.getstate()[0])
        return text

    def _strip(self, text: str) -> str:
        num_spaces = min(len(text) - len(text.lstrip(" ")), self._num_strippable)
        self._num_strippable = self._num_strippable - num_spaces if num_spaces == len(text) else 0
        return text[num_spaces:]
