"""`OutputDelta`s → OpenAI answers and stream chunks: pure functions, no I/O.

`AnswerHead` is what all parts of one answer share.  Called by `app.api.openai`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from app.schema.openai import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    MessageDelta,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    UsageBody,
)
from app.version import FINGERPRINT
from engine.api.output import OutputDelta, TextLogprob, Usage


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """`created` is in seconds since the epoch; `model` is the name as the client wrote it."""

    id: str
    created: int
    model: str
    has_logprobs: bool
    num_samples: int


def chat_completion(head: AnswerHead, deltas: Mapping[int, Sequence[OutputDelta]]) -> ChatCompletion:
    """The whole answer; `deltas` holds all deltas of each choice, the last one terminal."""
    choices = tuple(
        ChatChoice(
            index=index,
            message=AnswerMessage(content="".join(part.text for part in parts)),
            logprobs=_chat_logprobs(head, [entry for part in parts for entry in part.logprobs]),
            finish_reason=parts[-1].finish_reason or "stop",
            stop_reason=parts[-1].stop_reason,
        )
        for index, parts in sorted(deltas.items())
    )
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=FINGERPRINT,
        choices=choices,
        usage=total_usage(head, [part for parts in deltas.values() for part in parts]),
    )


def chat_chunk_choice(head: AnswerHead, delta: OutputDelta, *, is_first: bool) -> ChatChunkChoice:
    """The choice of one event; the first of each choice carries the role."""
    return ChatChunkChoice(
        index=delta.index,
        delta=MessageDelta(
            role="assistant" if is_first else UNSET,
            content=delta.text if delta.text or is_first else UNSET,
        ),
        logprobs=_chat_logprobs(head, delta.logprobs) if delta.logprobs else None,
        finish_reason=delta.finish_reason,
        stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
    )


def chat_envelope(head: AnswerHead, *, include_usage: bool) -> ChatChunk:
    """What all events of a streamed chat completion have in common: everything but the choice."""
    return _chat_chunk(head, (), None if include_usage else UNSET)


def chat_usage_chunk(head: AnswerHead, deltas: Sequence[OutputDelta]) -> ChatChunk:
    return _chat_chunk(head, (), total_usage(head, deltas))


def completion(head: AnswerHead, deltas: Mapping[int, Sequence[OutputDelta]]) -> Completion:
    """The whole answer of /v1/completions; `deltas` as in `chat_completion`."""
    choices = tuple(
        CompletionChoice(
            index=index,
            text="".join(part.text for part in parts),
            logprobs=_completion_logprobs(head, [entry for part in parts for entry in part.logprobs]),
            finish_reason=parts[-1].finish_reason,
            stop_reason=parts[-1].stop_reason,
        )
        for index, parts in sorted(deltas.items())
    )
    return _completion(head, choices, total_usage(head, [part for parts in deltas.values() for part in parts]))


def completion_chunk_choice(head: AnswerHead, delta: OutputDelta, *, is_first: bool) -> CompletionChoice:
    """The choice of one event; there is no role to announce, so `is_first` changes nothing."""
    return CompletionChoice(
        index=delta.index,
        text=delta.text,
        logprobs=_completion_logprobs(head, delta.logprobs) if delta.logprobs else None,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
    )


def completion_envelope(head: AnswerHead, *, include_usage: bool) -> Completion:
    """What all events of a streamed completion have in common: everything but the choice."""
    return _completion(head, (), None if include_usage else UNSET)


def completion_usage_chunk(head: AnswerHead, deltas: Sequence[OutputDelta]) -> Completion:
    return _completion(head, (), total_usage(head, deltas))


def total_usage(head: AnswerHead, deltas: Sequence[OutputDelta]) -> UsageBody:
    """Tokens of all choices; a prompt counts once however many samples it has.

    The cached part is that of a prompt's first sample: the others always hit what it just computed.
    """
    usages: dict[int, Usage] = {delta.index: delta.usage for delta in deltas if delta.usage is not None}
    firsts = [usage for index, usage in usages.items() if index % head.num_samples == 0]
    prompt_tokens = sum(usage.prompt_tokens for usage in firsts)
    completion_tokens = sum(usage.completion_tokens for usage in usages.values())
    return UsageBody(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(usage.cached_tokens for usage in firsts)),
    )


def _chat_chunk(
    head: AnswerHead, choices: tuple[ChatChunkChoice, ...], usage: UsageBody | UnsetType | None
) -> ChatChunk:
    return ChatChunk(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=FINGERPRINT,
        choices=choices,
        usage=usage,
    )


def _completion(
    head: AnswerHead, choices: tuple[CompletionChoice, ...], usage: UsageBody | UnsetType | None
) -> Completion:
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=FINGERPRINT,
        choices=choices,
        usage=usage,
    )


def _chat_logprobs(head: AnswerHead, entries: Sequence[TextLogprob]) -> ChatLogprobs | None:
    if not head.has_logprobs:
        return None
    return ChatLogprobs(
        tuple(
            TokenLogprob(
                token=entry.token,
                logprob=entry.logprob,
                bytes=tuple(entry.token.encode()),
                top_logprobs=tuple(
                    TopLogprob(token=token, logprob=logprob, bytes=tuple(token.encode()))
                    for token, _, logprob in entry.top
                ),
            )
            for entry in entries
        )
    )


def _completion_logprobs(head: AnswerHead, entries: Sequence[TextLogprob]) -> CompletionLogprobs | None:
    """The older form; its maps also hold the sampled token, as OpenAI's do."""
    if not head.has_logprobs:
        return None
    return CompletionLogprobs(
        tokens=tuple(entry.token for entry in entries),
        token_logprobs=tuple(entry.logprob for entry in entries),
        top_logprobs=tuple(
            {token: logprob for token, _, logprob in entry.top} | {entry.token: entry.logprob} for entry in entries
        ),
        text_offset=tuple(entry.text_offset for entry in entries),
    )
