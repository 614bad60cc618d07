"""What comes out of the engine: `StepOutput` (token ids) and `OutputDelta` (text).

Every sequence ends in exactly one terminal `StepOutput` (its `finish_reason` is set), and
every choice of a request in exactly one terminal `OutputDelta`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]

POOLED_OVERFLOW = (
    "The model's numbers are beyond what its number format holds; load it with another dtype, such as bfloat16 or "
    "float32."
)
"""Why a pooled prompt ends with an error."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities at one sampled position, before penalties and temperature.

    `top_ids` are ordered by falling probability and need not contain the sampled token.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class StepOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one engine step added to one sequence.

    `num_cached_tokens` counts prompt tokens served by the prefix cache.  `stop_token_id` is
    set when a stop token ended the sequence; that token is the last of `token_ids`.
    `error_message` accompanies finish reason "error".  `pooled` is what became of a prompt with `Pooling`:
    float32 numbers, little-endian, in the one output of that sequence.
    """

    sequence_id: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    error_message: str | None = None
    pooled: bytes = b""


class Pooled(msgspec.Struct, frozen=True):
    """What became of one prompt with `Pooling`: float32 numbers, little-endian, and how many tokens it had."""

    values: bytes
    num_tokens: int


class Scores(msgspec.Struct, frozen=True):
    """One score per pair, in order; `num_tokens` is what all of them took."""

    values: tuple[float, ...]
    num_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request; `cached_tokens` is the part of the prompt found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class TextLogprob(msgspec.Struct, frozen=True):
    """One sampled token as text, with its alternatives (text, id, logprob)."""

    token: str
    token_id: int
    logprob: float
    text_offset: int
    top: tuple[tuple[str, int, float], ...] = ()


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New text of one choice of one request; `finish_reason` and `usage` come with the last one.

    `stop_reason` is the stop string or stop token id that ended the choice, None for
    end-of-sequence.  `usage` counts this choice alone.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    error_message: str | None = None


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One finished choice, as the offline API returns it; `logprobs` holds one entry per token."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TextLogprob, ...] | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request of the offline API; `prompt` is None when token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int = 0
