"""`LLM`: the offline API, an engine in this very process.

    from engine import LLM, SamplingParams
    outputs = LLM("qwen3:0.6b").generate(["Hello"], SamplingParams(max_tokens=16))

Uses the same text stage and engine loop as the daemon, without sockets.  A model is a
checkpoint directory, a GGUF file, or the name of an installed model.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from engine.api.config import EngineConfig, LoadFormat, Quantization, WaitPolicy
from engine.api.errors import EngineError, InvalidParameter
from engine.api.output import CompletionOutput, OutputDelta, RequestOutput, TextLogprob
from engine.api.request import TRUNCATE_TO_CONTEXT, EmbedRequest, GenerateRequest, Prompt, ScoreRequest
from engine.api.sampling import SamplingParams
from engine.api.wire import EngineStats, WorkerFacts
from engine.build import OnProgress
from engine.engine import Engine, open_engine
from engine.offline_pooling import PooledModel
from engine.text.chat_template import ChatTemplate
from engine.text.model_files import is_bare
from engine.text.stage import SequenceText, TextStage, open_text_files
from engine.text.tokenizer import Tokenizer, empty_tokenizer

if TYPE_CHECKING:
    import numpy as np

    from store.presets.preset import Preset

EmbedInput = str | Sequence[int]
"""A text, or token ids."""

PromptInput = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages with `role` and `content`."""


class LLM:
    """A model loaded in this process; on a GPU one at a time, since its memory budget is the process's.

    Raises `EngineError` (`UnsupportedModel`, `BrokenCheckpoint`, `InsufficientMemory`) when the model cannot
    be loaded, and `store.errors.ModelNotFound` for a name that is not installed.  Of a model that `quire create`
    made, the context length counts, and in `chat` its messages and template; sampling is the caller's alone.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        load_format: LoadFormat = "auto",
        quantization: Quantization = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        num_kv_blocks: int | None = None,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        enable_cuda_graphs: bool = True,
        device: str = "auto",
        num_threads: int | None = None,
        pin_threads: bool = False,
        wait_policy: WaitPolicy = "auto",
        seed: int = 0,
        on_progress: OnProgress = lambda stage, done, total: None,
    ) -> None:
        path, self._preset = _find_model(model)
        if self._preset is not None and self._preset.parameters.context_length is not None:
            max_model_len = min(self._preset.parameters.context_length, max_model_len or sys.maxsize)
        config = EngineConfig(
            model=str(path),
            dtype=dtype,
            load_format=load_format,
            quantization=quantization,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            enable_cuda_graphs=enable_cuda_graphs,
            num_threads=num_threads,
            pin_threads=pin_threads,
            wait_policy=wait_policy,
            seed=seed,
        )
        # First, so that what reading a vocabulary takes for a moment does not come on top of the weights.
        self._sequence_ids = itertools.count(1)
        self._request_ids = itertools.count()
        self._pooled = PooledModel.of(path, load_format, self._next_sequence_id)
        text_files = _open_text_files(path, load_format) if self._pooled is None else None
        self._engine = open_engine(config, on_progress)
        if self._pooled is not None:
            self._pooled.opened(self.facts)
        self._text = TextStage(*text_files, self.facts.max_model_len, self.facts.vocab_size) if text_files else None

    @property
    def facts(self) -> WorkerFacts:
        """What the engine really got: KV blocks, context, dtype, bytes."""
        return self._engine.facts

    @property
    def engine(self) -> Engine:
        """The engine underneath, for programs that drive it step by step with sequence ids of their own."""
        return self._engine

    def stats(self) -> EngineStats:
        """Gauges and counters of the engine: blocks, prefix hits, preemptions."""
        return self._engine.stats()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of `prompts`.

        `sampling_params` is one value for all prompts or a list of one per prompt.
        """
        several = _as_list(prompts)
        params = _one_for_each(sampling_params, len(several))
        return self._run([self._request(prompt, sampling) for prompt, sampling in zip(several, params, strict=True)])

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **chat_template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of conversations, through the model's chat template."""
        is_single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast("list[Conversation]", [messages] if is_single else list(messages))
        params = _one_for_each(sampling_params, len(conversations))
        return self._run(
            [
                GenerateRequest(
                    request_id=str(next(self._request_ids)),
                    sampling=sampling,
                    messages=self._with_opening(conversation),
                    chat_template=self._preset.template if self._preset else None,
                    chat_template_kwargs=chat_template_kwargs,
                )
                for conversation, sampling in zip(conversations, params, strict=True)
            ]
        )

    def embed(
        self,
        inputs: EmbedInput | Sequence[EmbedInput],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        input_type: Literal["query", "document"] | None = None,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> list[np.ndarray]:
        """A float32 vector for each text, or list of token ids, in order.

        `dimensions` keeps the first components.  Before a text goes the model's prompt that is named `prompt_name`, or
        is meant for `input_type`, or says the `instruction`.  A text that is too long is an error, unless `truncate`
        leaves its end out.
        """
        if self._pooled is None:
            raise InvalidParameter(
                "model", "This model writes text; call generate or chat, or choose an embedding model."
            )
        several = cast("list[EmbedInput]", _as_list(inputs))
        request = EmbedRequest(
            inputs=tuple(item if isinstance(item, str) else tuple(item) for item in several),
            dimensions=dimensions,
            prompt_name=prompt_name,
            input_type=input_type,
            instruction=instruction,
            truncate_tokens=TRUNCATE_TO_CONTEXT if truncate else None,
            param="inputs",
        )
        return self._pooled.embed(self._engine, request)

    def score(
        self, pairs: Sequence[tuple[str, str]], *, instruction: str | None = None, truncate: bool = False
    ) -> list[float]:
        """How well the texts of each pair, a query and a document, go together, in order.

        A reranker's own score, or the cosine of an embedding model's vectors.  Arguments as those of `embed`.
        """
        if self._pooled is None:
            raise InvalidParameter("model", "This model writes text; call generate, or choose a reranker.")
        request = ScoreRequest(
            pairs=tuple((query, document) for query, document in pairs),
            instruction=instruction,
            truncate_tokens=TRUNCATE_TO_CONTEXT if truncate else None,
            param="pairs",
        )
        return self._pooled.score(self._engine, request)

    def _next_sequence_id(self) -> int:
        return next(self._sequence_ids)

    def _with_opening(self, conversation: Conversation) -> tuple[dict[str, Any], ...]:
        messages = tuple(dict(message) for message in conversation)
        return self._preset.opening(messages) if self._preset and messages else messages

    def _request(self, prompt: PromptInput, sampling: SamplingParams) -> GenerateRequest:
        request_id = str(next(self._request_ids))
        if isinstance(prompt, Mapping):
            prompt = _prompt_of_mapping(prompt)
        text = prompt if isinstance(prompt, str) else None
        return GenerateRequest(
            request_id=request_id,
            sampling=sampling,
            text=text,
            token_ids=None if text is not None else tuple(cast("Sequence[int]", prompt)),
            prompt_param="prompts",
        )

    def _run(self, requests: list[GenerateRequest]) -> list[RequestOutput]:
        """Run all requests to their end; the engine batches them as its budgets allow."""
        if self._text is None:
            raise InvalidParameter(
                "model", "This model makes vectors or scores; call embed or score, or choose a chat model."
            )
        collectors: list[list[_Collector]] = []
        running: dict[int, _Collector] = {}
        for request in requests:
            choices = []
            for index, prompt in enumerate(self._text.prepare(request, self._next_sequence_id)):
                choice = _Collector(prompt, self._text.stream(request, prompt, index))
                choices.append(choice)
                running[prompt.sequence_id] = choice
            collectors.append(choices)
        # Only once all prompts are known to be valid does any of them start.
        for choice in running.values():
            self._engine.submit(choice.prompt)
        self._run_to_completion(running)
        return [_collect(request, choices) for request, choices in zip(requests, collectors, strict=True)]

    def _run_to_completion(self, running: dict[int, _Collector]) -> None:
        try:
            while running:
                for output in self._engine.step():
                    choice = running.get(output.sequence_id)
                    if choice is None:
                        continue
                    choice.add(choice.text.push(output))
                    if choice.text.finished:
                        del running[output.sequence_id]
                        if output.finish_reason is None:
                            self._engine.abort(output.sequence_id)
        finally:
            # An interrupted run leaves nothing behind in the engine.
            for sequence_id in running:
                self._engine.abort(sequence_id)


class _Collector:
    """Gathers the deltas of one choice."""

    def __init__(self, prompt: Prompt, text: SequenceText) -> None:
        self.prompt = prompt
        self.text = text
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TextLogprob] = []
        self._last: OutputDelta | None = None

    def add(self, delta: OutputDelta) -> None:
        self._pieces.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._last = delta

    @property
    def num_cached_tokens(self) -> int:
        return self._last.usage.cached_tokens if self._last and self._last.usage else 0

    def output(self) -> CompletionOutput:
        last = self._last
        assert last is not None and last.finish_reason is not None, "a choice is collected once it has finished"
        if last.finish_reason == "error":
            raise EngineError(last.error_message or "The engine failed without a reason.")
        return CompletionOutput(
            index=last.index,
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=tuple(self._logprobs) if self.prompt.sampling.logprobs is not None else None,
        )


def _collect(request: GenerateRequest, choices: list[_Collector]) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.text,
        prompt_token_ids=choices[0].prompt.token_ids,
        outputs=tuple(choice.output() for choice in choices),
        num_cached_tokens=choices[0].num_cached_tokens,
    )


def _open_text_files(model: Path, load_format: LoadFormat) -> tuple[Tokenizer, ChatTemplate | None]:
    """What the text stage needs."""
    return (empty_tokenizer(), None) if is_bare(model, load_format) else open_text_files(model)


def _find_model(model: str | Path) -> tuple[Path, Preset | None]:
    path = Path(model)
    if path.exists():
        return path, None
    # Names need the model store, which a program that only uses paths need not have installed.
    from store.models import ModelStore
    from store.paths import DataRoot

    installed = ModelStore(DataRoot.open()).find(str(model))
    return installed.path, installed.preset


def _prompt_of_mapping(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    """The text or token ids of `{"prompt": ...}` or `{"prompt_token_ids": ...}`."""
    match dict(prompt):
        case {"prompt": str(text), **rest} if not rest:
            return text
        case {"prompt_token_ids": token_ids, **rest} if not rest:
            return cast("Sequence[int]", token_ids)
    raise InvalidParameter("prompts", "A prompt mapping has either `prompt` or `prompt_token_ids`, and nothing else.")


def _as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if len(sampling_params) != count:
        raise InvalidParameter(
            "sampling_params",
            f"There are {count} prompts but {len(sampling_params)} sampling params; give one for each.",
        )
    return sampling_params
