"""Vectors and scores for `engine.LLM`: prompts of the pooling stage, run to their end in this very process.

The counterpart of `app.pooling`, without a worker, clients and queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from engine.api.config import LoadFormat
from engine.api.errors import EngineError, InvalidParameter
from engine.api.request import EmbedRequest, Prompt, ScoreRequest
from engine.api.wire import WorkerFacts
from engine.engine import Engine
from engine.pooling.config import ModelPooling, read_pooling
from engine.text.model_files import is_bare
from engine.text.pooling_stage import PoolingStage
from engine.text.text_encoder import TextEncoder, load_text_encoder

_FLOATS = np.dtype("<f4")


class PooledModel:
    """Texts to vectors, and pairs of texts to scores, with one engine.

    Made before the weights are loaded: `opened` says how large everything is.
    """

    def __init__(self, encoder: TextEncoder, pooling: ModelPooling, next_sequence_id: Callable[[], int]) -> None:
        self._encoder = encoder
        self._pooling = pooling
        self._next_sequence_id = next_sequence_id
        self._stage: PoolingStage | None = None

    @classmethod
    def of(cls, model: Path, load_format: LoadFormat, next_sequence_id: Callable[[], int]) -> PooledModel | None:
        """Of the model's files; None for one that writes text.  Raises as `read_pooling` and `load_text_encoder`."""
        pooling = read_pooling(model)
        if pooling is None:
            return None
        if is_bare(model, load_format):
            return cls(TextEncoder(tokenizers.Tokenizer(tokenizers.models.BPE())), pooling, next_sequence_id)
        return cls(load_text_encoder(model), pooling, next_sequence_id)

    def opened(self, facts: WorkerFacts) -> None:
        """Take over what the loaded engine really got.  Raises as `PoolingStage`."""
        self._stage = PoolingStage(
            self._encoder,
            self._pooling,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            embedding_length=facts.embedding_length,
        )

    @property
    def stage(self) -> PoolingStage:
        assert self._stage is not None, "the engine is not open yet"
        return self._stage

    def embed(self, engine: Engine, request: EmbedRequest) -> list[np.ndarray]:
        """One float32 vector per input, in order.  Raises `EngineError`."""
        if self._pooling.task != "embed":
            raise InvalidParameter(
                "model", "This model scores pairs of texts; call score, or choose an embedding model."
            )
        return self._run(engine, self.stage.embed(request, self._next_sequence_id))

    def score(self, engine: Engine, request: ScoreRequest) -> list[float]:
        """One score per pair, in order: of a reranker, or the cosine of an embedding model.  Raises `EngineError`."""
        if self._pooling.task == "embed":
            return self._compare(engine, request)
        outputs = self._run(engine, self.stage.score(request, self._next_sequence_id))
        return [self._pooling.score_of(float(output[0])) for output in outputs]

    def _compare(self, engine: Engine, request: ScoreRequest) -> list[float]:
        """The cosines of an embedding model's vectors; each text becomes a vector once."""
        queries, documents = (tuple(dict.fromkeys(side)) for side in zip(*request.pairs, strict=True))
        query_vectors, document_vectors = (
            dict(zip(texts, map(_unit, self.embed(engine, asked)), strict=True))
            for texts, asked in zip((queries, documents), self.stage.compare(request, queries, documents), strict=True)
        )
        return [float(query_vectors[query] @ document_vectors[document]) for query, document in request.pairs]

    def _run(self, engine: Engine, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """What becomes of each prompt; nothing stays in the engine, however this ends."""
        pooled: dict[int, np.ndarray] = {}
        try:
            for prompt in prompts:
                engine.submit(prompt)
            while len(pooled) < len(prompts):
                for output in engine.step():
                    if output.finish_reason != "stop":
                        raise EngineError(output.error_message or "The engine failed without a reason.")
                    pooled[output.sequence_id] = np.frombuffer(output.pooled, dtype=_FLOATS)
        finally:
            _abort(engine, (prompt.sequence_id for prompt in prompts if prompt.sequence_id not in pooled))
        return [pooled[prompt.sequence_id] for prompt in prompts]


def _abort(engine: Engine, sequence_ids: Iterable[int]) -> None:
    for sequence_id in sequence_ids:
        engine.abort(sequence_id)


def _unit(vector: np.ndarray) -> np.ndarray:
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector
