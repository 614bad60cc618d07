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
from engine.api.errors import EngineBusy
from engine.api.output import StepOutput
from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from engine.api.wire import EngineStats, WorkerMemory
from engine.build import OnProgress, build_engine
from engine.core.batch import ScheduledBatch
from engine.holdings import Holdings
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
        self._holdings = Holdings(parts.weights, parts.facts.fixed_bytes, parts.measure_held)
        self._pipeline_depth = parts.pipeline_depth
        self._hidden_size = parts.hidden_size
        self._undelivered: list[StepOutput] = []
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
        return replayed is not None and replayed.has_wanted and not self._holdings.is_asleep

    def spare_step(self) -> None:
        """Capture one more graph that this model has needed, now or in an earlier run; some tens of milliseconds."""
        if self._runner.replayed is not None and self.has_spare_work:
            self._runner.replayed.capture_wanted()

    def submit(self, prompt: Prompt) -> None:
        """Queue a sequence.  Raises `InvalidParameter`, `ContextLengthExceeded` or `EngineAsleep` if it cannot run."""
        self._holdings.require_awake()
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
        scheduler = self._scheduler
        return self._holdings.memory(
            num_kv_blocks=scheduler.block_pool.num_blocks, max_model_len=scheduler.max_model_len
        )

    def resize_cache(self, num_blocks: int) -> WorkerMemory:
        """See `engine.engine.Engine`: what is in flight is finished first, then blocks move, then memory does."""
        self._holdings.require_awake()
        self._finish_steps()
        pool, attention = self._scheduler.block_pool, self._attention
        num_blocks = min(num_blocks, attention.max_blocks)
        if num_blocks < pool.num_blocks:
            self._undelivered += self._guarded(lambda: self._vacate(num_blocks))
            num_blocks = pool.num_blocks
        # Blocks that keep their memory although they were given up are as good as any.
        self._scheduler.resize(attention.resize(num_blocks))
        return self.memory()

    def _vacate(self, num_blocks: int) -> list[StepOutput]:
        """Leave nothing in the blocks from `num_blocks` on, or as near as open sequences allow; ends none of them."""
        moves = self._scheduler.resize(num_blocks)
        self._runner.forget_blocks(self._scheduler.block_pool.num_blocks)
        self._attention.move_blocks([source for source, _ in moves], [target for _, target in moves])
        return []

    def sleep(self) -> WorkerMemory:
        """See `engine.engine.Engine`; outputs that were not fetched yet come with the next step all the same."""
        if not self._holdings.is_asleep:
            if self._scheduler.has_work:
                raise EngineBusy("The model cannot sleep while it has open sequences; wait until they end.")
            self._finish_steps()
            self._holdings.sleep()
            self._scheduler.forget_prefixes()
            self._attention.resize(0)
        return self.memory()

    def wake(self, num_blocks: int) -> WorkerMemory:
        """See `engine.engine.Engine`."""
        if not self._holdings.is_asleep:
            return self.resize_cache(num_blocks)
        attention, scheduler = self._attention, self._scheduler
        with self._holdings.waking():
            # The driver is asked for the cache's memory while the weights are being copied.
            num_blocks = attention.resize(max(scheduler.least_blocks, min(num_blocks, attention.max_blocks)))
        self._runner.forget_blocks(num_blocks)
        scheduler.resize(num_blocks)
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
