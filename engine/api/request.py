"""What goes into the engine: requests (text level) and `Prompt` (token ids).

`app.translate` and `engine.llm` build a `GenerateRequest`, an `EmbedRequest` or a `ScoreRequest`; the
text stages turn it into `Prompt`s, and only those cross the wire to the worker.
"""

from __future__ import annotations

from typing import Any, Literal

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


TRUNCATE_TO_CONTEXT = -1
"""`truncate_tokens` for as many tokens as the model takes."""


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts, or token ids that are used as they are; each becomes one vector, shortened to `dimensions`.

    Before each text goes one of the model's own prompts: that named `prompt_name`, or the one for `input_type`, if the
    model has one; `instruction` says the task in the model's prompt for queries.  A text that is too long is an error
    unless `truncate_tokens` says how many of its tokens count.  `param` is the
    request field that the texts came from, for error messages.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None
    prompt_name: str | None = None
    input_type: Literal["query", "document"] | None = None
    instruction: str | None = None
    truncate_tokens: int | None = None
    param: str = "input"


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of texts, a query and a document each, to be judged by how well they go together.

    `instruction` says the task, for models that take one.  `truncate_tokens` is as in `EmbedRequest`, of a whole pair;
    of each document no more than `max_document_tokens` count.  `param` is the request field of the documents.
    """

    pairs: tuple[tuple[str, str], ...]
    instruction: str | None = None
    truncate_tokens: int | None = None
    max_document_tokens: int | None = None
    param: str = "documents"


class Pooling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What to make of a prompt instead of continuing it: one vector, or one number.

    "embed" gives the pooled hidden state as the model defines it, "score" the output of its classification
    head, and "choice" the probability of `choice_ids[0]` against `choice_ids[1]` as the next token.
    `dimensions` keeps the first components of a vector, which then gets length 1 anew (Matryoshka, Kusupati et al.
    2022, https://arxiv.org/abs/2205.13147).  `second_start` is where the second text of a pair begins, for models
    that tell the two apart; 0 means that there is none.
    """

    kind: Literal["embed", "score", "choice"]
    dimensions: int | None = None
    choice_ids: tuple[int, int] | None = None
    second_start: int = 0


class Prompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence to generate, or to pool.

    `stop_token_ids` already includes the model's end-of-sequence ids unless the request
    ignores them; `max_tokens` is resolved and fits the context.  `sequence_id` is unique
    per worker.  With `pooling` nothing is generated, and `max_tokens` and `sampling` do not count.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    pooling: Pooling | None = None
