"""Which special tokens the tokenizer itself puts around a text.

Knows nothing of where the choice comes from; called by `engine.text.tokenizer` and
`engine.text.gguf_tokenizer`.
"""

from __future__ import annotations

import tokenizers
from tokenizers import processors


def set_sequence_template(backend: tokenizers.Tokenizer, bos_token_id: int | None, eos_token_id: int | None) -> None:
    """Make `encode` with special tokens begin with `bos_token_id` and end with `eos_token_id`; None adds nothing."""
    before = [] if bos_token_id is None else [_named(backend, bos_token_id)]
    after = [] if eos_token_id is None else [_named(backend, eos_token_id)]
    backend.post_processor = processors.TemplateProcessing(
        single=[*(token for token, _ in before), "$A", *(token for token, _ in after)],
        special_tokens=list(dict.fromkeys([*before, *after])),
    )


def _named(backend: tokenizers.Tokenizer, token_id: int) -> tuple[str, int]:
    token = backend.id_to_token(token_id)
    assert token is not None, "the callers look their ids up in the same vocabulary"
    return token, token_id
