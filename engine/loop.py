"""`EngineLoop`: one model, ready to run; a step reads schedule, launch, commit.

Built by `engine.worker` (one process per resident model) and by `engine.LLM` (in process).
Knows token ids only.  Where the device works beside the host, the next step is scheduled and
launched before the oldest one's tokens are known here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec
import torch

from engine.api.config import EngineConfig
from engine.api.errors import EngineAsleep, EngineBusy, EngineError
from engine.api.output import StepOutput
from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from engine.api.wire import EngineStats, WorkerMemory
from engine.build import OnProgress, build_engine
from engine.core.batch import ScheduledBatch
from engine.runner.largest_step import EVERY_WAY
from engine.runner.model_runner import PendingStep
from engine.runner.prompt_pooling import check_pooling

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
        self._attention = parts.attention
        self._weights = parts.weights
        self._measure_asleep = parts.measure_asleep
        self._pipeline_depth = parts.pipeline_depth
        self._hidden_size = parts.hidden_size
        self._undelivered: list[StepOutput] = []
        self._is_asleep = False
        self._host_bytes = 0
        self._in_flight: deque[tuple[ScheduledBatch, PendingStep]] = deque()
        self.facts = parts.facts
        on_progress("producing a first result", 0, 0)
        self._warm_up()
        self.facts = msgspec.structs.replace(parts.facts, load_seconds=time.perf_counter() - started)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight or self._undelivered)

    @property
    def has_spare_work(self) -> bool:
        """Whether `spare_step` has something to prepare while there is nothing to generate."""
        replayed = self._runner.replayed
        return replayed is not None and replayed.has_wanted and not self._is_asleep

    def spare_step(self) -> None:
        """Capture one more graph that this model has needed, now or in an earlier run; some tens of milliseconds."""
        replayed = self._runner.replayed
        if replayed is not None and replayed.has_wanted:
            replayed.capture_wanted()

    def submit(self, prompt: Prompt) -> None:
        """Queue a sequence.  Raises `InvalidParameter`, `ContextLengthExceeded` or `EngineAsleep` if it cannot run."""
        if self._is_asleep:
            raise EngineAsleep("The model is asleep; wake it first.")
        check_pooling(prompt.pooling, self.facts, self._hidden_size)
        self._scheduler.add(prompt)

    def abort(self, sequence_id: int) -> StepOutput | None:
        """Drop a sequence and free its blocks now; None if it is not known."""
        output = self._scheduler.abort(sequence_id)
        if output is not None:
            self._undelivered = [other for other in self._undelivered if other.sequence_id != sequence_id]
        return output

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def memory(self) -> WorkerMemory:
        """What the engine holds now."""
        facts = self.facts
        return WorkerMemory(
            num_kv_blocks=0 if self._is_asleep else self._scheduler.block_pool.num_blocks,
            max_model_len=self._scheduler.max_model_len,
            fixed_bytes=self._measure_asleep() if self._is_asleep else facts.fixed_bytes,
            host_bytes=self._host_bytes,
            is_asleep=self._is_asleep,
        )

    def resize_cache(self, num_blocks: int) -> WorkerMemory:
        """See `engine.engine.Engine`: what is in flight is finished first, then blocks move, then memory does."""
        if self._is_asleep:
            raise EngineAsleep("The model is asleep and has no KV cache; wake it first.")
        self._finish_steps()
        scheduler, attention = self._scheduler, self._attention
        num_blocks = min(num_blocks, attention.max_blocks)
        if num_blocks > scheduler.block_pool.num_blocks:
            scheduler.resize(attention.resize(num_blocks))
            return self.memory()
        moves = scheduler.resize(num_blocks)
        attention.move_blocks([source for source, _ in moves], [target for _, target in moves])
        self._runner.forget_blocks(scheduler.block_pool.num_blocks)
        # Blocks that keep their memory are as good as any.
        scheduler.resize(attention.resize(scheduler.block_pool.num_blocks))
        return self.memory()

    def sleep(self) -> WorkerMemory:
        """See `engine.engine.Engine`."""
        if self._is_asleep:
            return self.memory()
        if self._scheduler.has_work:
            raise EngineBusy("The model cannot sleep while it has open sequences; wait until they end.")
        self._finish_steps()
        self._host_bytes = self._weights.sleep()
        self._scheduler.forget_prefixes()
        self._attention.resize(0)
        self._is_asleep = True
        return self.memory()

    def wake(self, num_blocks: int) -> WorkerMemory:
        """See `engine.engine.Engine`."""
        if not self._is_asleep:
            return self.resize_cache(num_blocks)
        # The driver is asked for the cache's memory while the weights are being copied.
        self._weights.wake()
        try:
            num_blocks = self._attention.resize(max(1, min(num_blocks, self._attention.max_blocks)))
        except EngineError:
            self._host_bytes = self._weights.sleep()
            raise
        self._weights.settle()
        self._is_asleep, self._host_bytes = False, 0
        self._runner.forget_blocks(num_blocks)
        self._scheduler.resize(num_blocks)
        return self.memory()

    def _finish_steps(self) -> None:
        """Wait for the steps in flight and keep their outputs for the next `step`."""
        while self._in_flight:
            self._undelivered += self._guarded(self._commit_oldest)

    def step(self) -> list[StepOutput]:
        """Advance every running sequence that the budgets allow by one step.

        A step for which the device's memory does not suffice ends every sequence with an error.  After any other
        exception, an interrupt included, every sequence has ended too and the engine can go on.
        """
        outputs, self._undelivered = self._undelivered, []
        return outputs + self._guarded(self._step)

    def _guarded(self, advance: Callable[[], list[StepOutput]]) -> list[StepOutput]:
        try:
            return advance()
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
        return self._commit_oldest()

    def _commit_oldest(self) -> list[StepOutput]:
        oldest, pending = self._in_flight.popleft()
        return self._scheduler.commit(oldest, pending.wait())

    def _warm_up(self) -> None:
        """Produce real tokens, or vectors, from a prompt, so that "ready" means that the whole path has run.

        Where kernels are compiled, one prompt's tokens are drawn in every way that there is.  Kernels of other batch
        sizes may still be compiled when they first come up.
        """
        num_tokens = max(1, min(WARM_UP_TOKENS, self._scheduler.max_model_len - 2))
        pooling = Pooling("embed") if self.facts.task == "embed" else None
        is_drawn = self._runner.compiles and pooling is None
        for token_id, sampling in enumerate((PLAIN, EVERY_WAY) if is_drawn else (PLAIN,)):
            self.submit(Prompt(WARM_UP_SEQUENCE_ID, (token_id,) * num_tokens, 2, sampling, pooling=pooling))
            while self.has_work:
                self.step()
        self._scheduler.reset_stats()
