"""`PoolingStage`: texts to `Prompt`s that become a vector or a score each, for one model.

The counterpart of `engine.text.stage` for models that do not write.  Everything a request can get wrong about its
texts is refused here.  Knows no HTTP and no worker, and does not see what becomes of the prompts.  Used by
`app.pooling` and by `engine.llm`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from engine.api.errors import ContextLengthExceeded, InvalidParameter, UnsupportedModel
from engine.api.request import TRUNCATE_TO_CONTEXT, EmbedRequest, Pooling, Prompt, ScoreRequest
from engine.api.sampling import SamplingParams
from engine.pooling.config import ModelPooling
from engine.pooling.dimensions import check_dimensions
from engine.text import rerank_template
from engine.text.text_encoder import EncodedPair, TextEncoder

_PROMPT_NAMES = {
    "query": ("query", "search_query", "retrieval.query", "Retrieval-query"),
    "document": ("document", "passage", "corpus", "search_document", "retrieval.passage", "Retrieval-document"),
}
"""What publishers call the prompts for the two sides of a search."""

_INSTRUCTED = re.compile(r"(Instruct: ).*?(\nQuery: ?)", re.DOTALL)
"""The prompt of models that are told the task, such as Qwen3-Embedding."""

_NO_SAMPLING = SamplingParams()


class PoolingStage:
    """Texts in, `Prompt`s out; holds no state of any request.

    `max_model_len` is what the worker's context holds now, `embedding_length` the length of an embedding model's
    vectors.
    """

    def __init__(
        self, encoder: TextEncoder, pooling: ModelPooling, *, max_model_len: int, vocab_size: int, embedding_length: int
    ) -> None:
        """Raises `UnsupportedModel` for a model whose answers are not in its vocabulary."""
        self.pooling = pooling
        self.max_model_len = max_model_len
        self._encoder = encoder
        self._vocab_size = vocab_size
        self._embedding_length = embedding_length
        self._choice_ids = self._find_choices()

    @property
    def max_tokens(self) -> int:
        """The longest text, or pair, special tokens included."""
        return min(self.max_model_len, self.pooling.max_length or self.max_model_len)

    def embed(self, request: EmbedRequest, next_sequence_id: Callable[[], int]) -> list[Prompt]:
        """One `Prompt` per input, in order.  Raises `InvalidParameter` and `ContextLengthExceeded`."""
        check_dimensions(request.dimensions, self._embedding_length)
        prefix = self._prompt_text(request)
        if not request.inputs:
            raise InvalidParameter(request.param, f"{request.param} is empty; send at least one text.")
        limit = self._limit(request.truncate_tokens, self._encoder.num_special_tokens())
        cut = limit if request.truncate_tokens is not None else None
        texts = [self._cased(prefix + text) for text in request.inputs if isinstance(text, str)]
        _check_unicode(texts, request.param)
        encoded = iter(self._encoder.encode(texts, max_tokens=cut))
        pooling = Pooling("embed", request.dimensions)
        prompts = []
        for index, given in enumerate(request.inputs):
            token_ids = next(encoded) if isinstance(given, str) else self._checked_ids(given, request.param)[:cut]
            self._check_length(len(token_ids), limit, request.param, index)
            prompts.append(_prompt(next_sequence_id(), token_ids, pooling))
        return prompts

    def score(self, request: ScoreRequest, next_sequence_id: Callable[[], int]) -> list[Prompt]:
        """One `Prompt` per pair, in order.  Raises `InvalidParameter` and `ContextLengthExceeded`."""
        if not request.pairs:
            raise InvalidParameter(request.param, f"{request.param} is empty; send at least one text.")
        _check_unicode([text for pair in request.pairs for text in pair], request.param)
        cut = request.max_document_tokens
        pairs = [
            (self._cased(query), self._cased(text if cut is None else self._encoder.start_of(text, cut)))
            for query, text in request.pairs
        ]
        if self._choice_ids is not None:
            return self._choose(pairs, request, self._choice_ids, next_sequence_id)
        if request.instruction is not None:
            raise _no_instruction()
        limit = self._limit(request.truncate_tokens, self._encoder.num_special_tokens(is_pair=True))
        encoded = self._encoder.encode_pairs(pairs, max_tokens=None if request.truncate_tokens is None else limit)
        return [
            self._scored_pair(pair, limit, request.param, index, next_sequence_id())
            for index, pair in enumerate(encoded)
        ]

    def compare(
        self, request: ScoreRequest, queries: Sequence[str], documents: Sequence[str]
    ) -> tuple[EmbedRequest, EmbedRequest]:
        """What to ask an embedding model for where its vectors of `queries` and `documents` are to be compared."""
        cut = request.max_document_tokens
        return (
            EmbedRequest(
                inputs=tuple(queries),
                input_type="query" if request.instruction is None else None,
                instruction=request.instruction,
                truncate_tokens=request.truncate_tokens,
                param="query",
            ),
            EmbedRequest(
                inputs=tuple(text if cut is None else self._encoder.start_of(text, cut) for text in documents),
                input_type="document",
                truncate_tokens=request.truncate_tokens,
                param=request.param,
            ),
        )

    def _scored_pair(self, pair: EncodedPair, limit: int, param: str, index: int, sequence_id: int) -> Prompt:
        self._check_length(len(pair.token_ids), limit, param, index)
        return _prompt(sequence_id, pair.token_ids, Pooling("score", second_start=pair.second_start))

    def _choose(
        self,
        pairs: Sequence[tuple[str, str]],
        request: ScoreRequest,
        choice_ids: tuple[int, int],
        next_sequence_id: Callable[[], int],
    ) -> list[Prompt]:
        """Prompts to which the model answers with one of two tokens."""
        instruction = request.instruction or self._default_instruction()
        before, after = self._encoder.encode((rerank_template.BEFORE, rerank_template.AFTER), add_special_tokens=False)
        limit = self._limit(request.truncate_tokens, len(before) + len(after))
        room = limit - len(before) - len(after)
        questions = [rerank_template.question(instruction, query, document) for query, document in pairs]
        encoded = self._encoder.encode(
            questions, max_tokens=None if request.truncate_tokens is None else room, add_special_tokens=False
        )
        pooling = Pooling("choice", choice_ids=choice_ids)
        prompts = []
        for index, middle in enumerate(encoded):
            self._check_length(len(before) + len(middle) + len(after), limit, request.param, index)
            prompts.append(_prompt(next_sequence_id(), (*before, *middle, *after), pooling))
        return prompts

    def _prompt_text(self, request: EmbedRequest) -> str:
        """What goes before each text."""
        chosen = {
            name: value
            for name in ("prompt_name", "input_type", "instruction")
            if (value := getattr(request, name)) is not None
        }
        if len(chosen) > 1:
            raise InvalidParameter(next(iter(chosen)), f"{' and '.join(chosen)} exclude each other; give one of them.")
        text = self._chosen_prompt(request)
        if text and any(not isinstance(given, str) for given in request.inputs) and chosen:
            name = next(iter(chosen))
            raise InvalidParameter(
                name, f"{name} goes before texts, not before token ids; send texts, or leave it out."
            )
        return text

    def _chosen_prompt(self, request: EmbedRequest) -> str:
        prompts = self.pooling.prompts
        if request.instruction is not None:
            return self._instructed(request.instruction)
        if request.prompt_name is not None:
            if request.prompt_name not in prompts:
                known = (
                    f"it has {', '.join(prompts)}" if prompts else "it has none; put the words before the text yourself"
                )
                raise InvalidParameter("prompt_name", f"The model has no prompt {request.prompt_name!r}; {known}.")
            return prompts[request.prompt_name]
        if request.input_type is not None:
            return next((prompts[name] for name in _PROMPT_NAMES[request.input_type] if name in prompts), "")
        return prompts[self.pooling.default_prompt] if self.pooling.default_prompt else ""

    def _instructed(self, instruction: str) -> str:
        for prompt in self.pooling.prompts.values():
            if match := _INSTRUCTED.fullmatch(prompt):
                return f"{match[1]}{instruction}{match[2]}"
        raise _no_instruction()

    def _default_instruction(self) -> str:
        name = self.pooling.default_prompt
        return (self.pooling.prompts[name] if name else "") or rerank_template.DEFAULT_INSTRUCTION

    def _find_choices(self) -> tuple[int, int] | None:
        if self.pooling.choices is None:
            return None
        first, second = (
            self._encoder.token_id(choice) if isinstance(choice, str) else choice for choice in self.pooling.choices
        )
        if first is None or second is None:
            raise UnsupportedModel(
                f"The model is to answer {' or '.join(map(str, self.pooling.choices))}, which its vocabulary does not "
                "have; choose another reranker."
            )
        return first, second

    def _limit(self, truncate_tokens: int | None, num_fixed_tokens: int) -> int:
        """How many tokens a text may have, with the `num_fixed_tokens` that are always there."""
        if truncate_tokens in (None, TRUNCATE_TO_CONTEXT):
            return self.max_tokens
        assert truncate_tokens is not None
        if not num_fixed_tokens < truncate_tokens <= self.max_tokens:
            raise InvalidParameter(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens is {truncate_tokens:,}; give {TRUNCATE_TO_CONTEXT} for as many as the model "
                f"takes, or {num_fixed_tokens + 1:,} to {self.max_tokens:,}.",
            )
        return truncate_tokens

    def _check_length(self, num_tokens: int, limit: int, param: str, index: int) -> None:
        if num_tokens == 0:
            raise InvalidParameter(param, f"{param}[{index}] is empty; send at least one token.")
        if num_tokens > limit:
            message = (
                f"{param}[{index}] takes {num_tokens:,} tokens, and the model takes {limit:,}; shorten it, or have "
                f"its end left out with truncate_prompt_tokens: {TRUNCATE_TO_CONTEXT}."
            )
            raise ContextLengthExceeded(num_tokens, limit, param=param, message=message)

    def _checked_ids(self, token_ids: tuple[int, ...], param: str) -> tuple[int, ...]:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            outside = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
            raise InvalidParameter(
                param,
                f"{param} holds the token id {outside}, but this model's ids go from 0 to {self._vocab_size - 1}; use "
                "ids of this model's vocabulary.",
            )
        return token_ids

    def _cased(self, text: str) -> str:
        return text.lower() if self.pooling.lowercase else text


def _prompt(sequence_id: int, token_ids: tuple[int, ...], pooling: Pooling) -> Prompt:
    return Prompt(sequence_id, token_ids, 0, _NO_SAMPLING, pooling=pooling)


def _no_instruction() -> InvalidParameter:
    return InvalidParameter(
        "instruction", "This model was not trained to be told the task; leave instruction out, or use Qwen3 models."
    )


def _check_unicode(texts: Sequence[str], param: str) -> None:
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidParameter(
                param, f"{param} holds an unpaired surrogate at character {error.start} of a text; send valid Unicode."
            ) from error
