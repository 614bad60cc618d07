"""`EngineLoop`: one model, ready to run; a step reads schedule, launch, commit.

Built by `engine.worker` (one process per resident model) and by `engine.LLM` (in process).
Knows token ids only.  Where the device works beside the host, the next step is scheduled and
launched before the oldest one's tokens are known here.
"""

from __future__ import annotations

import logging
import time
from collections import deque

import msgspec
import torch

from engine.api.config import EngineConfig
from engine.api.output import StepOutput
from engine.api.request import Prompt
from engine.api.sampling import SamplingParams
from engine.api.wire import EngineStats
from engine.build import OnProgress, build_engine
from engine.core.batch import ScheduledBatch
from engine.runner.largest_step import EVERY_WAY
from engine.runner.model_runner import PendingStep

log = logging.getLogger(__name__)

WARM_UP_SEQUENCE_ID = 0
PLAIN = SamplingParams(temperature=0.0)
WARM_UP_TOKENS = 17
"""More than a block of 16, so that the warm-up has a prompt to compute and not a single token."""


class EngineLoop:
    """Owns model, KV cache and scheduler; not thread-safe, driven by one thread.

    Sequence ids given to `submit` must be positive and unique.  Raises what `build_engine` raises.
    """

    def __init__(self, config: EngineConfig, on_progress: OnProgress = lambda stage, done, total: None) -> None:
        started = time.perf_counter()
        parts = build_engine(config, on_progress)
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._pipeline_depth = parts.pipeline_depth
        self._in_flight: deque[tuple[ScheduledBatch, PendingStep]] = deque()
        on_progress("producing a first token", 0, 0)
        self._warm_up()
        self.facts = msgspec.structs.replace(parts.facts, load_seconds=time.perf_counter() - started)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight)

    @property
    def has_spare_work(self) -> bool:
        """Whether `spare_step` has something to prepare while there is nothing to generate."""
        replayed = self._runner.replayed
        return replayed is not None and replayed.has_wanted

    def spare_step(self) -> None:
        """Capture one more graph that this model has needed, now or in an earlier run; some tens of milliseconds."""
        replayed = self._runner.replayed
        if replayed is not None and replayed.has_wanted:
            replayed.capture_wanted()

    def submit(self, prompt: Prompt) -> None:
        """Queue a sequence.  Raises `InvalidParameter` or `ContextLengthExceeded` if it can never run."""
        self._scheduler.add(prompt)

    def abort(self, sequence_id: int) -> StepOutput | None:
        """Drop a sequence and free its blocks now; None if it is not known."""
        return self._scheduler.abort(sequence_id)

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def step(self) -> list[StepOutput]:
        """Advance every running sequence that the budgets allow by one step.

        A step for which the device's memory does not suffice ends every sequence with an error.  After any other
        exception, an interrupt included, every sequence has ended too and the engine can go on.
        """
        try:
            return self._step()
        except torch.cuda.OutOfMemoryError:
            log.exception("a step ran out of memory")
            self._in_flight.clear()
            return self._scheduler.abort_all(
                "The device ran out of memory; lower max_num_seqs or gpu_memory_utilization, or stop other programs "
                "that use the device."
            )
        except BaseException:
            # The scheduler counts what it scheduled as computed, and offers it to later prompts.
            self._in_flight.clear()
            self._scheduler.abort_all("The step that computed this sequence failed.")
            raise

    def _step(self) -> list[StepOutput]:
        batch = self._scheduler.schedule()
        if batch is not None:
            self._in_flight.append((batch, self._runner.launch(batch)))
            if len(self._in_flight) < self._pipeline_depth:
                return []
        if not self._in_flight:
            return []
        oldest, pending = self._in_flight.popleft()
        return self._scheduler.commit(oldest, pending.wait())

    def _warm_up(self) -> None:
        """Produce real tokens from a prompt, so that "ready" means that the whole path has run.

        Where kernels are compiled, one prompt's tokens are drawn in every way that there is.  Kernels of other batch
        sizes may still be compiled when they first come up.
        """
        num_tokens = max(1, min(WARM_UP_TOKENS, self._scheduler.config.max_model_len - 2))
        for token_id, sampling in enumerate((PLAIN, EVERY_WAY) if self._runner.compiles else (PLAIN,)):
            self.submit(Prompt(WARM_UP_SEQUENCE_ID, (token_id,) * num_tokens, 2, sampling))
            while self.has_work:
                self.step()
        self._scheduler.reset_stats()
