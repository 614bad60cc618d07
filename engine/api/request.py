"""What goes into the engine: `GenerateRequest` (text level) and `Prompt` (token ids).

`app.translate` and `engine.llm` build a `GenerateRequest`; the text stage turns it into
one `Prompt` per sample, and only `Prompt`s cross the wire to the worker.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.api.sampling import SamplingParams


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation request; exactly one of `messages`, `text`, `token_ids` is given.

    `messages` are role/content dicts as chat templates expect them.  `prompt_param` is the
    name of the request field the prompt came from, for error messages.  `chat_template` is Jinja
    that takes the place of the model's own.
    """

    request_id: str
    sampling: SamplingParams
    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    add_special_tokens: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    cache_salt: str = ""
    prompt_param: str = "messages"


class Prompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence to generate.

    `stop_token_ids` already includes the model's end-of-sequence ids unless the request
    ignores them; `max_tokens` is resolved and fits the context.  `sequence_id` is unique
    per worker.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
