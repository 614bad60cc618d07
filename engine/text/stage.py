"""`TextStage`: the border between text and token ids for one model.

A `GenerateRequest` becomes one validated `Prompt` per sample, and the outputs of each become
text again through a `SequenceText`.  Everything a request can get wrong about its prompt and
sampling is refused here, so that the worker sees only what it can serve.  Knows no HTTP and
no worker.  Used by the daemon's completion handlers and by `engine.llm`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.api.errors import ContextLengthExceeded, InvalidParameter
from engine.api.request import GenerateRequest, Prompt
from engine.api.sampling import SamplingParams
from engine.text.chat_template import ChatTemplate, gguf_chat_template, load_chat_template
from engine.text.freed_memory import return_freed_memory
from engine.text.sequence_text import SequenceText
from engine.text.tokenizer import Tokenizer, gguf_tokenizer, load_tokenizer
from store.formats.gguf_parts import read_gguf_metadata

__all__ = ["SequenceText", "TextStage", "open_text_files"]


class TextStage:
    """Text in, `Prompt`s out, and back; holds no state of any request.

    `vocab_size` is the number of ids that the model knows, which may exceed the tokenizer's.
    `max_model_len` is the context in tokens, prompt and answer together.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, max_model_len: int, vocab_size: int
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size

    def prepare(self, request: GenerateRequest, next_sequence_id: Callable[[], int]) -> list[Prompt]:
        """Return one `Prompt` per sample; sample i draws with seed + i.

        `max_tokens` is cut to the room that the prompt leaves in the context, and the answer
        then ends with finish reason "length".  Raises InvalidParameter, and
        ContextLengthExceeded where not even one token fits behind the prompt.
        """
        sampling = request.sampling
        sampling.validate()
        self._check_sampling_ids(sampling)
        token_ids = self._prompt_token_ids(request)
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise ContextLengthExceeded(len(token_ids) + 1, self.max_model_len, param=request.prompt_param)
        if sampling.min_tokens > room:
            raise InvalidParameter(
                "min_tokens",
                f"min_tokens ({sampling.min_tokens:,}) is above the {room:,} tokens that fit behind the prompt; "
                "lower it or shorten the prompt.",
            )
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        stop_token_ids = self._stop_token_ids(sampling)
        return [
            Prompt(
                sequence_id=next_sequence_id(),
                token_ids=token_ids,
                max_tokens=max_tokens,
                sampling=_sampling_of_sample(sampling, sample),
                stop_token_ids=stop_token_ids,
                cache_salt=request.cache_salt,
            )
            for sample in range(sampling.n)
        ]

    def stream(self, request: GenerateRequest, prompt: Prompt, index: int) -> SequenceText:
        """Return the text side of choice `index`.

        An answer to messages is a text of its own; any other output continues its prompt's.
        """
        return SequenceText(
            self.tokenizer,
            request.sampling,
            index=index,
            num_prompt_tokens=len(prompt.token_ids),
            continues_text=request.messages is None,
        )

    def _prompt_token_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        param = request.prompt_param
        if sum(given is not None for given in (request.messages, request.text, request.token_ids)) != 1:
            raise InvalidParameter(param, "Give exactly one of messages, a text or token ids as the prompt.")
        if request.messages is not None:
            # The template writes the beginning-of-sequence token itself.
            token_ids = self._encode(self._render(request), param, add_special_tokens=False)
        elif request.text is not None:
            token_ids = self._encode(request.text, param, add_special_tokens=request.add_special_tokens)
        else:
            token_ids = request.token_ids or ()
        if not token_ids:
            raise InvalidParameter(param, "The prompt is empty; give at least one token.")
        self._check_ids(param, "The prompt", token_ids)
        return token_ids

    def _render(self, request: GenerateRequest) -> str:
        if not request.messages:
            raise InvalidParameter(request.prompt_param, "The list of messages is empty; give at least one message.")
        template = self.chat_template
        if request.chat_template is not None:
            template = _compiled(request.chat_template, self.tokenizer.bos_token, self.tokenizer.eos_token)
        if template is None:
            raise InvalidParameter(
                request.prompt_param, "This model has no chat template; send a plain prompt instead of messages."
            )
        return template.render(request.messages, **request.chat_template_kwargs)

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidParameter(
                param, f"The prompt holds an unpaired surrogate at character {error.start}; send valid Unicode."
            ) from error
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _check_sampling_ids(self, sampling: SamplingParams) -> None:
        self._check_ids("logit_bias", "logit_bias", tuple(sampling.logit_bias or ()))
        self._check_ids("stop_token_ids", "stop_token_ids", sampling.stop_token_ids)

    def _check_ids(self, param: str, subject: str, token_ids: tuple[int, ...]) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            outside = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise InvalidParameter(
                param,
                f"{subject} holds the token id {outside}, but this model's ids go from 0 to {self.vocab_size - 1}; "
                "use ids of this model's vocabulary.",
            )

    def _stop_token_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        eos = () if sampling.ignore_eos else self.tokenizer.eos_token_ids
        # A tokenizer may name ids that the model's output layer does not have.
        known_eos = (token_id for token_id in eos if token_id < self.vocab_size)
        return tuple(dict.fromkeys((*known_eos, *sampling.stop_token_ids)))


@functools.lru_cache(maxsize=16)
def _compiled(source: str, bos_token: str, eos_token: str) -> ChatTemplate:
    """A template that came with a request: compiled once for all of its kind."""
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)


def open_text_files(model: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    """What a checkpoint directory or GGUF file says about text, for a `TextStage`; errors as `load_tokenizer`."""
    opened = _open_text_files(model)
    return_freed_memory()
    return opened


def _open_text_files(model: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    if model.is_dir():
        tokenizer = load_tokenizer(model)
        return tokenizer, load_chat_template(model, tokenizer)
    metadata = read_gguf_metadata(model)
    tokenizer = gguf_tokenizer(metadata)
    return tokenizer, gguf_chat_template(metadata, tokenizer)


def _sampling_of_sample(sampling: SamplingParams, sample: int) -> SamplingParams:
    if sampling.seed is None or sample == 0:
        return sampling
    # Seeds are signed 64-bit numbers; the last one wraps around.
    seed = (sampling.seed + sample + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, seed=seed)
