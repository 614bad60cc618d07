"""`EncoderLoop`: one encoder, ready to run; a step reads take, launch, wait.

The counterpart of `engine.loop` for models that turn whole texts into vectors or scores.  Built by
`engine.engine.open_engine`.  Knows token ids only.  Where the device works beside the host, the next step is launched
before the oldest one's results are here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import torch

from engine.api.config import EngineConfig
from engine.api.errors import EngineBusy, InvalidParameter
from engine.api.output import StepOutput
from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from engine.api.wire import EngineStats, WorkerMemory
from engine.build import OnProgress
from engine.core.text_queue import TextQueue
from engine.encoder_build import build_encoder
from engine.holdings import Holdings
from engine.pooling.dimensions import check_dimensions
from engine.runner.encoder_runner import PendingTexts

log = logging.getLogger(__name__)

_WARM_UP_SEQUENCE_ID = 0
_WARM_UP_TOKENS = 17
_OUT_OF_MEMORY = (
    "The device ran out of memory; lower max_num_batched_tokens, or stop other programs that use the device."
)


class EncoderLoop:
    """Owns model and queue; not thread-safe, driven by one thread.

    Sequence ids given to `submit` must be positive and unique.  Raises what `build_encoder` raises.
    """

    def __init__(self, config: EngineConfig, on_progress: OnProgress = lambda stage, done, total: None) -> None:
        started = time.perf_counter()
        parts = build_encoder(config, on_progress)
        self._runner = parts.runner
        self._holdings = Holdings(parts.weights, parts.facts.fixed_bytes, parts.measure_held)
        self._kind = parts.pooling.task
        self._pipeline_depth = parts.pipeline_depth
        self._queue = TextQueue(
            max_num_tokens=parts.limits.max_num_batched_tokens,
            max_num_texts=parts.limits.max_num_seqs,
            max_model_len=parts.limits.max_model_len,
        )
        self._in_flight: deque[PendingTexts] = deque()
        self._running: set[int] = set()
        self._num_steps = 0
        self._num_tokens = 0
        self.facts = parts.facts
        on_progress("reading a first text", 0, 0)
        self._warm_up()
        self.facts = msgspec.structs.replace(parts.facts, load_seconds=time.perf_counter() - started)

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._in_flight)

    @property
    def has_spare_work(self) -> bool:
        """Never: there is nothing to prepare."""
        return False

    def spare_step(self) -> None:
        """Nothing to prepare."""

    def submit(self, prompt: Prompt) -> None:
        """Queue a text.  Raises `InvalidParameter`, `ContextLengthExceeded` or `EngineAsleep` if it cannot run."""
        self._holdings.require_awake()
        if prompt.sequence_id in self._running or prompt.sequence_id in self._queue:
            raise InvalidParameter("sequence_id", f"Sequence {prompt.sequence_id} is still running; use a new id.")
        self._check(prompt)
        self._queue.add(prompt)

    def abort(self, sequence_id: int) -> StepOutput | None:
        """Drop a text; None if it is not known.  What a step in flight makes of it is dropped too."""
        if self._queue.remove(sequence_id) or sequence_id in self._running:
            self._running.discard(sequence_id)
            return StepOutput(sequence_id, finish_reason="abort")
        return None

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._queue),
            prompt_tokens_total=self._num_tokens,
            steps_total=self._num_steps,
        )

    def memory(self) -> WorkerMemory:
        """What the engine holds now."""
        return self._holdings.memory(num_kv_blocks=0, max_model_len=self.facts.max_model_len)

    def resize_cache(self, num_blocks: int) -> WorkerMemory:
        """See `engine.engine.Engine`: there is no cache, and nothing changes."""
        self._holdings.require_awake()
        return self.memory()

    def sleep(self) -> WorkerMemory:
        """See `engine.engine.Engine`."""
        if not self._holdings.is_asleep:
            if self._queue or self._running:
                raise EngineBusy("The model cannot sleep while it has open texts; wait until they end.")
            while self._in_flight:  # of texts that were aborted
                self.step()
            self._holdings.sleep()
        return self.memory()

    def wake(self, num_blocks: int) -> WorkerMemory:
        """See `engine.engine.Engine`: the weights are all there is."""
        if self._holdings.is_asleep:
            with self._holdings.waking():
                pass
        return self.memory()

    def step(self) -> list[StepOutput]:
        """Compute the texts that have waited longest, as many as a step holds.

        A step for which the device's memory does not suffice ends its own texts with an error.  After any other
        exception, an interrupt included, every text has ended and the engine can go on.
        """
        try:
            return self._step()
        except BaseException:
            self._in_flight.clear()
            self._running.clear()
            self._queue.clear()
            raise

    def _step(self) -> list[StepOutput]:
        prompts = self._queue.take()
        if prompts:
            self._running.update(prompt.sequence_id for prompt in prompts)
            self._num_steps += 1
            self._num_tokens += sum(len(prompt.token_ids) for prompt in prompts)
            try:
                self._in_flight.append(self._runner.launch(prompts))
            except torch.cuda.OutOfMemoryError:
                return self._ended(self._out_of_memory(prompts))
            if len(self._in_flight) < self._pipeline_depth:
                return []
        if not self._in_flight:
            return []
        oldest = self._in_flight.popleft()
        try:
            return self._ended(oldest.wait())
        except torch.cuda.OutOfMemoryError:
            return self._ended(self._out_of_memory(oldest.prompts))

    def _ended(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Those of the outputs whose texts were not aborted meanwhile."""
        wanted = [output for output in outputs if output.sequence_id in self._running]
        self._running.difference_update(output.sequence_id for output in wanted)
        return wanted

    def _out_of_memory(self, prompts: Sequence[Prompt]) -> list[StepOutput]:
        log.exception("a step ran out of memory")
        return [
            StepOutput(prompt.sequence_id, finish_reason="error", error_message=_OUT_OF_MEMORY) for prompt in prompts
        ]

    def _check(self, prompt: Prompt) -> None:
        pooling, facts = prompt.pooling, self.facts
        if pooling is None:
            raise InvalidParameter("model", "This model makes vectors or scores, and no text; choose a chat model.")
        if pooling.kind != self._kind:
            made = "vectors" if self._kind == "embed" else "scores"
            raise InvalidParameter("model", f"This model makes {made}; choose another for what was asked.")
        check_dimensions(pooling.dimensions, facts.embedding_length)
        if prompt.token_ids and not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < facts.vocab_size:
            raise InvalidParameter(
                "input", f"The text has token ids outside of 0 to {facts.vocab_size - 1:,}; use the model's own ids."
            )

    def _warm_up(self) -> None:
        """Read one text, so that "ready" means that the whole path has run."""
        num_tokens = min(_WARM_UP_TOKENS, self.facts.max_model_len)
        pooling = Pooling(self._kind)
        self.submit(Prompt(_WARM_UP_SEQUENCE_ID, (0,) * num_tokens, 0, SamplingParams(), pooling=pooling))
        while self.has_work:
            self.step()
        self._num_steps = self._num_tokens = 0
