"""From requests to text: ties a model's text stage to its worker.

`Generator` belongs to one resident model; `generate` is the whole path of a job: find or
load the model, prepare prompts, submit, turn step outputs into text deltas, and abort what
is unfinished when the caller stops listening.  Knows no HTTP; called by `app.api`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from app.metrics import Metrics, RequestClock
from app.residency.workers.worker_client import WorkerClient
from engine.api.errors import EngineError
from engine.api.output import OutputDelta, StepOutput
from engine.api.request import GenerateRequest, Prompt
from engine.text.stage import SequenceText, TextStage

if TYPE_CHECKING:
    from app.residency.supervisor import Supervisor
    from app.translate.job import GenerateJob
    from app.usage_recorder import UsageRecorder

_INLINE_PROMPT_CHARS = 2000
"""Below this, tokenising takes less time than a hop to a thread and back."""


async def generate(supervisor: Supervisor, job: GenerateJob) -> AsyncGenerator[list[OutputDelta], None]:
    """All deltas of a job, batched as in `Generator.generate`; loads the model first where it is not resident.

    Close it (`contextlib.aclosing`) to abort.  Raises `EngineError`, `StoreError`, `QueueFull`, and `WrongTask` for a
    model that does not write.
    """
    async with supervisor.serving(job.model, tasks=("generate",), keep_alive=job.keep_alive) as lease:
        resident = lease.resident
        assert resident.generator is not None
        requests = job.requests(resident.sampling_defaults(lease.model), lease.model.preset)
        async with aclosing(resident.generator.generate(requests)) as deltas:
            async for delta in deltas:
                yield delta


FAILURES = ("error", "abort")
"""Finish reasons of a sequence that did not end by itself."""


class Generator:
    """Runs requests on one worker."""

    def __init__(
        self, model: str, text: TextStage, worker: WorkerClient, metrics: Metrics, usage: UsageRecorder
    ) -> None:
        self._model = model
        self._text = text
        self._worker = worker
        self._metrics = metrics
        self._usage = usage
        self._num_open = 0

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[OutputDelta], None]:
        """Deltas of all choices as they come; choice indices run over requests, then samples.

        Each batch holds what is new since the last: while the caller keeps up, one delta of each
        choice that the engine's step advanced; to a caller that falls behind, several steps come as
        one delta.  Ends after every choice had its terminal delta, or raises; either way, and when the
        caller leaves, nothing stays open in the worker.
        """
        clock = self._metrics.start_request(self._model)
        texts: dict[int, SequenceText] = {}
        num_opened = 0
        outcome = "cancelled"
        try:
            prepared = await self._prepare(requests)
            for index, (request, prompt) in enumerate(prepared):
                texts[prompt.sequence_id] = self._text.stream(request, prompt, index)
            num_opened = len(texts)
            self._num_open += num_opened
            mailbox = self._worker.submit([prompt for _, prompt in prepared])
            while texts:
                outputs = await mailbox.take()
                deltas = [
                    self._advance(texts, output, clock)
                    for output in outputs
                    if output.sequence_id in texts and output.finish_reason not in FAILURES
                ]
                if deltas:
                    yield deltas
                for output in outputs:
                    if output.finish_reason in FAILURES and output.sequence_id in texts:
                        raise self._worker.failure or EngineError(output.error_message or "The request was dropped.")
            clock.finished()
            outcome = "finished"
        except Exception:
            outcome = "error"
            raise
        finally:
            self._worker.abort(texts)
            for text in texts.values():
                self._record_lengths(text)
            self._num_open -= num_opened
            if outcome != "finished":
                clock.failed(outcome)

    def _advance(self, texts: dict[int, SequenceText], output: StepOutput, clock: RequestClock) -> OutputDelta:
        """Push one step into its choice; forgets the choice when that ends it."""
        if output.token_ids:
            clock.tokens(output.sequence_id, len(output.token_ids))
        text = texts[output.sequence_id]
        delta = text.push(output)
        if text.finished:
            del texts[output.sequence_id]
            self._record_lengths(text)
            clock.choice_finished(delta.finish_reason or "stop")
            if output.finish_reason is None:
                # A stop string ended the choice, which the worker cannot know.
                self._worker.abort((output.sequence_id,))
        return delta

    def _record_lengths(self, text: SequenceText) -> None:
        """Count a sequence that has ended, if it got as far as a token."""
        counts = text.usage
        if counts.completion_tokens:
            self._usage.record(
                self._model,
                counts.prompt_tokens,
                counts.completion_tokens,
                max_model_len=self._text.max_model_len,
                num_at_once=self._num_open,
            )

    async def _prepare(self, requests: Sequence[GenerateRequest]) -> list[tuple[GenerateRequest, Prompt]]:
        def prepare_all() -> list[tuple[GenerateRequest, Prompt]]:
            return [
                (request, prompt)
                for request in requests
                for prompt in self._text.prepare(request, self._worker.next_sequence_id)
            ]

        if sum(_prompt_chars(request) for request in requests) <= _INLINE_PROMPT_CHARS:
            return prepare_all()
        return await asyncio.to_thread(prepare_all)


def _prompt_chars(request: GenerateRequest) -> int:
    messages = sum(len(message["content"]) for message in request.messages or ())
    return messages + len(request.text or "") + len(request.token_ids or ())
