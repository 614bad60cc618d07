"""OpenAI request bodies → `GenerateJob`: pure functions, no model and no I/O.

What a client asks for is either passed on or refused by name; nothing is dropped silently.
Called by `app.api.openai`; the other direction is `app.translate.openai_output`.
"""

from __future__ import annotations

from typing import Any

from app.keep_alive import granted_keep_alive
from app.schema.openai import ChatMessage, ChatRequest, CompletionRequest, GenerationFields
from app.translate.job import GenerateJob
from app.translate.prompts import split_prompts
from app.translate.refusal import refuse_unsupported
from engine.api.errors import InvalidParameter
from engine.api.request import GenerateRequest
from engine.api.sampling import SamplingParams

MAX_STOP_STRINGS = 16
MAX_CHOICES = 1024
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` on /v1/completions, which old clients count on."""

_DEFAULTS_ONLY: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "web_search_options": (),
    "prompt_cache_key": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
"""Fields of OpenAI's API that this version lacks, with the values that ask for nothing."""

_SAME_NAME_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def chat_job(body: ChatRequest, request_id: str, *, max_keep_alive: float) -> GenerateJob:
    """`max_keep_alive` is the most that the client is granted, in seconds.

    Raises `InvalidParameter` for the first field that cannot be served.
    """
    _refuse_unsupported(body)
    if not body.messages:
        raise InvalidParameter("messages", "messages must hold at least one message.")
    if body.add_special_tokens:
        raise InvalidParameter("add_special_tokens", "The chat template writes special tokens itself; leave it out.")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidParameter("top_logprobs", "top_logprobs needs logprobs to be true.")
    prompt = GenerateRequest(
        request_id=request_id,
        sampling=SamplingParams(),
        messages=tuple(_template_message(message, index) for index, message in enumerate(body.messages)),
        add_special_tokens=False,
        chat_template_kwargs=body.chat_template_kwargs or {},
        prompt_param="messages",
    )
    overrides = _sampling_overrides(
        body,
        max_tokens=_chat_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return GenerateJob(body.model, (prompt,), overrides, granted_keep_alive(body.keep_alive, max_keep_alive))


def completion_job(body: CompletionRequest, request_id: str, *, max_keep_alive: float) -> GenerateJob:
    """As `chat_job`.  Raises `InvalidParameter` for the first field that cannot be served."""
    _refuse_unsupported(body)
    prompts = tuple(
        GenerateRequest(
            request_id=request_id,
            sampling=SamplingParams(),
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
            add_special_tokens=body.add_special_tokens is not False,
            prompt_param="prompt",
        )
        for prompt in split_prompts(body.prompt, "prompt")
    )
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    overrides = _sampling_overrides(body, max_tokens=max_tokens, logprobs=body.logprobs)
    num_choices = len(prompts) * int(overrides.get("n", 1))
    if num_choices > MAX_CHOICES:
        raise InvalidParameter("n", f"prompts × n is {num_choices:,}; ask for at most {MAX_CHOICES:,} at once.")
    return GenerateJob(body.model, prompts, overrides, granted_keep_alive(body.keep_alive, max_keep_alive))


def _refuse_unsupported(body: ChatRequest | CompletionRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options", "stream_options needs stream to be true.")
    refuse_unsupported(body, _DEFAULTS_ONLY)


def _sampling_overrides(body: GenerationFields, *, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
    """The sampling fields that are given, checked as far as that goes without the model's defaults."""
    overrides = {name: value for name in _SAME_NAME_FIELDS if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        overrides["stop"] = (body.stop,) if isinstance(body.stop, str) else body.stop
        if len(overrides["stop"]) > MAX_STOP_STRINGS:
            raise InvalidParameter("stop", f"stop may hold at most {MAX_STOP_STRINGS} strings.")
    if max_tokens is not None:
        overrides["max_tokens"] = max_tokens
    if logprobs is not None:
        overrides["logprobs"] = logprobs
    SamplingParams(**overrides).validate()
    return overrides


def _chat_max_tokens(body: ChatRequest) -> int | None:
    if body.max_tokens is None:
        return body.max_completion_tokens
    if body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidParameter("max_tokens", "max_tokens and max_completion_tokens differ; give one of them.")
    return body.max_tokens


def _template_message(message: ChatMessage, index: int) -> dict[str, Any]:
    """The role/content dict that chat templates expect.

    `developer` is OpenAI's newer name for `system`, which is the one that templates know.
    """
    for name in ("tool_calls", "function_call", "refusal", "annotations", "audio"):
        if getattr(message, name) not in (None, []):
            param = f"messages[{index}].{name}"
            raise InvalidParameter(param, f"{param} is not supported by this version; leave it out.")
    if message.content is None and message.role != "assistant":
        raise InvalidParameter(f"messages[{index}].content", f"A {message.role} message needs content.")
    if message.content is None or isinstance(message.content, str):
        content = message.content or ""
    else:
        content = "\n".join(part.text for part in message.content)
    result: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    return result
