"""`TextEncoder`: texts and pairs of texts to token ids, many at once, and never back.

For models that are asked for vectors and scores, whose tokenizers need not be able to write text (WordPiece,
Unigram).  What stands around a text is what tokenizer.json says; what is too long loses its end in the way of
transformers and sentence-transformers.  Knows no models and no requests.  Used by `engine.text.pooling_stage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers

from engine.text.freed_memory import return_freed_memory
from engine.text.tokenizer import load_backend


class EncodedPair(NamedTuple):
    """Two texts as one sequence; `second_start` is where the second begins for a model that tells them apart, or 0."""

    token_ids: tuple[int, ...]
    second_start: int


class TextEncoder:
    """One model's tokenizer, for encoding alone; safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def num_special_tokens(self, *, is_pair: bool = False) -> int:
        """How many tokens stand around and between texts."""
        return self._backend.num_special_tokens_to_add(is_pair)

    def token_id(self, spelling: str) -> int | None:
        """The id of a token, None where the vocabulary does not have it."""
        return self._backend.token_to_id(spelling)

    def encode(
        self, texts: Sequence[str], *, max_tokens: int | None = None, add_special_tokens: bool = True
    ) -> list[tuple[int, ...]]:
        """The token ids of each text, on all cores.

        Of one with more than `max_tokens`, special tokens included, the end is left out, the special ones stay.
        """
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        encoded = [tuple(encoding.ids) for encoding in encodings]
        if max_tokens is None:
            return encoded
        return [
            ids if len(ids) <= max_tokens else self._encode_start(text, max_tokens, add_special_tokens)
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], *, max_tokens: int | None = None) -> list[EncodedPair]:
        """Each pair as one sequence; of one with more than `max_tokens` the longer text loses its end first."""
        encodings = self._backend.encode_batch_fast(list(pairs))
        if max_tokens is not None:
            encodings = [
                encoding if len(encoding) <= max_tokens else self._encode_pair_start(pair, max_tokens)
                for pair, encoding in zip(pairs, encodings, strict=True)
            ]
        return [_pair(encoding) for encoding in encodings]

    def start_of(self, text: str, max_tokens: int) -> str:
        """The characters that the first `max_tokens` tokens of a text stand for; special tokens do not count."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return text if len(encoding) <= max_tokens else text[: encoding.offsets[max_tokens][0]]

    def _encode_start(self, text: str, max_tokens: int, add_special_tokens: bool) -> tuple[int, ...]:
        room = max_tokens - (self.num_special_tokens() if add_special_tokens else 0)
        encoding = self._backend.encode(text, add_special_tokens=False)
        encoding.truncate(max(0, room))
        return tuple(self._backend.post_process(encoding, add_special_tokens=add_special_tokens).ids)

    def _encode_pair_start(self, pair: tuple[str, str], max_tokens: int) -> tokenizers.Encoding:
        room = max_tokens - self.num_special_tokens(is_pair=True)
        first, second = (self._backend.encode(text, add_special_tokens=False) for text in pair)
        first_length, second_length = longest_first(len(first), len(second), max(0, room))
        first.truncate(first_length)
        second.truncate(second_length)
        return self._backend.post_process(first, second)


def load_text_encoder(model: Path) -> TextEncoder:
    """Of a checkpoint directory or a GGUF file; errors as `engine.text.tokenizer.load_tokenizer`."""
    encoder = TextEncoder(load_backend(model))
    return_freed_memory()
    return encoder


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """What is left of two lengths when the longer one gives way until both fit `room`.

    Where both must give way, the first gets the smaller half, or the second if it is the shorter text; as
    `truncate_encodings` of the library has it (huggingface/tokenizers, src/utils/truncation.rs).
    """
    if first + second <= room:
        return first, second
    if first > second:
        second_left, first_left = longest_first(second, first, room)
        return first_left, second_left
    half = room // 2
    return (first, room - first) if first <= half else (half, room - half)


def _pair(encoding: tokenizers.Encoding) -> EncodedPair:
    types = encoding.type_ids
    return EncodedPair(tuple(encoding.ids), types.index(1) if 1 in types else 0)
