"""From texts to vectors and scores: ties a model's pooling stage to its worker.

`Pooler` belongs to one resident model; `embed` and `score` are the whole path of a job: find or load the model,
prepare prompts, submit, collect, and abort what is unfinished when the caller leaves.  The counterpart of
`app.generation`.  Knows no HTTP; called by `app.api`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from app.metrics import Metrics
from app.residency.workers.step_mailbox import StepMailbox
from app.residency.workers.worker_client import WorkerClient
from engine.api.errors import EngineError
from engine.api.output import Pooled, Scores, StepOutput
from engine.api.request import EmbedRequest, Prompt, ScoreRequest
from engine.text.pooling_stage import PoolingStage

if TYPE_CHECKING:
    from app.residency.supervisor import Supervisor
    from app.translate.job import EmbedJob, ScoreJob
    from app.usage_recorder import UsageRecorder

_INLINE_CHARS = 2000
"""Below this, tokenising takes less time than a hop to a thread and back."""

_MOST_OPEN_TOKENS = {"cpu": 8192, "cuda": 131072}
"""Of one request in the worker: a few of its steps.  The rest waits here, so that a request of thousands of texts
takes turns with others."""


async def embed(supervisor: Supervisor, job: EmbedJob) -> list[Pooled]:
    """One vector per input, in order; loads the model first where it is not resident.

    Raises `EngineError`, `StoreError`, `QueueFull`, and `app.errors.WrongTask` for a model that makes no vectors.
    """
    async with supervisor.serving(job.model, tasks=("embed",), keep_alive=job.keep_alive) as lease:
        assert lease.resident.pooler is not None
        return await lease.resident.pooler.embed(job.request)


async def score(supervisor: Supervisor, job: ScoreJob) -> Scores:
    """One score per pair, in order: of a reranker, or the cosines of an embedding model.  Raises as `embed` does."""
    async with supervisor.serving(job.model, tasks=("score", "embed"), keep_alive=job.keep_alive) as lease:
        assert lease.resident.pooler is not None
        return await lease.resident.pooler.score(job.request)


class Pooler:
    """Runs prompts that are pooled on one worker."""

    def __init__(
        self, model: str, stage: PoolingStage, worker: WorkerClient, metrics: Metrics, usage: UsageRecorder, device: str
    ) -> None:
        self.stage = stage
        self._model = model
        self._worker = worker
        self._metrics = metrics
        self._usage = usage
        self._num_open = 0
        self._most_open_tokens = _MOST_OPEN_TOKENS["cuda" if device.startswith("cuda") else "cpu"]

    async def embed(self, request: EmbedRequest) -> list[Pooled]:
        """One vector per input, in order."""
        num_chars = sum(len(given) for given in request.inputs)
        return await self._pool(lambda: self.stage.embed(request, self._worker.next_sequence_id), num_chars)

    async def score(self, request: ScoreRequest) -> Scores:
        """One score per pair, in order."""
        if self.stage.pooling.task == "embed":
            return await self._compare(request)
        num_chars = sum(len(query) + len(document) for query, document in request.pairs)
        pooled = await self._pool(lambda: self.stage.score(request, self._worker.next_sequence_id), num_chars)
        values = tuple(self.stage.pooling.score_of(array("f", one.values)[0]) for one in pooled)
        return Scores(values, sum(one.num_tokens for one in pooled))

    async def _compare(self, request: ScoreRequest) -> Scores:
        """The cosines of an embedding model; a text that is in several pairs becomes a vector once."""
        queries, documents = (tuple(dict.fromkeys(side)) for side in zip(*request.pairs, strict=True))
        asked = await asyncio.to_thread(self.stage.compare, request, queries, documents)
        of_queries, of_documents = [await self.embed(one) for one in asked]

        def cosines() -> tuple[float, ...]:
            query_vectors = dict(zip(queries, map(_vector, of_queries), strict=True))
            document_vectors = dict(zip(documents, map(_vector, of_documents), strict=True))
            return tuple(cosine(query_vectors[query], document_vectors[text]) for query, text in request.pairs)

        num_tokens = sum(one.num_tokens for one in itertools.chain(of_queries, of_documents))
        return Scores(await asyncio.to_thread(cosines), num_tokens)

    async def _pool(self, prepare: Callable[[], list[Prompt]], num_chars: int) -> list[Pooled]:
        clock = self._metrics.start_request(self._model)
        outcome = "cancelled"
        try:
            prompts = prepare() if num_chars <= _INLINE_CHARS else await asyncio.to_thread(prepare)
            pooled = await self.run(prompts)
            clock.finished()
            outcome = "finished"
        except Exception:
            outcome = "error"
            raise
        finally:
            if outcome != "finished":
                clock.failed(outcome)
        for _ in pooled:
            clock.choice_finished("stop")
        return pooled

    async def run(self, prompts: Sequence[Prompt]) -> list[Pooled]:
        """What becomes of each prompt, in order; nothing stays open in the worker, however this ends.

        Raises the worker's failure, or what it says of a prompt that it could not pool.
        """
        waiting = deque(prompts)
        open_prompts: dict[int, Prompt] = {}
        num_open_tokens = 0
        pooled: dict[int, Pooled] = {}
        mailbox = StepMailbox()
        try:
            while waiting or open_prompts:
                batch = _take(waiting, self._most_open_tokens - num_open_tokens, is_first=not open_prompts)
                if batch:
                    open_prompts.update((prompt.sequence_id, prompt) for prompt in batch)
                    num_open_tokens += sum(len(prompt.token_ids) for prompt in batch)
                    self._num_open += len(batch)
                    self._worker.submit(batch, mailbox)
                for output in await mailbox.take():
                    num_tokens = len(open_prompts.pop(output.sequence_id).token_ids)
                    num_open_tokens -= num_tokens
                    self._num_open -= 1
                    pooled[output.sequence_id] = Pooled(self._values(output), num_tokens)
                    self._record(num_tokens)
        finally:
            self._num_open -= len(open_prompts)
            self._worker.abort(open_prompts)
        return [pooled[prompt.sequence_id] for prompt in prompts]

    def _record(self, num_tokens: int) -> None:
        """Count a prompt that has ended."""
        length = self.stage.max_tokens
        self._usage.record(self._model, num_tokens, 0, max_model_len=length, num_at_once=self._num_open + 1)

    def _values(self, output: StepOutput) -> bytes:
        if output.finish_reason in ("error", "abort"):
            raise self._worker.failure or EngineError(output.error_message or "The request was dropped.")
        return output.pooled


def _take(waiting: deque[Prompt], room: int, *, is_first: bool) -> list[Prompt]:
    """The prompts whose turn it is: as many as there is room for in tokens, and one in any case if none is open."""
    taken: list[Prompt] = []
    while waiting and (len(waiting[0].token_ids) <= room or (is_first and not taken)):
        room -= len(waiting[0].token_ids)
        taken.append(waiting.popleft())
    return taken


def _vector(pooled: Pooled) -> array[float]:
    return array("f", pooled.values)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0 if one of them has no length."""
    lengths = math.hypot(*first) * math.hypot(*second)
    return sum(map(float.__mul__, first, second)) / lengths if lengths else 0.0
