"""`EngineLoop`: one model, ready to run; a step reads schedule, launch, commit.

Built by `engine.worker` (one process per resident model) and by `engine.LLM` (in process).
Knows token ids only.  With `PIPELINE_DEPTH` steps in flight the next step is scheduled and
launched before the oldest one's tokens are known to the host.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from engine.api.config import EngineConfig
from engine.api.errors import InvalidParameter
from engine.api.output import StepOutput
from engine.api.request import Prompt
from engine.api.sampling import SamplingParams
from engine.api.wire import EngineStats, WorkerFacts
from engine.attention.backend import CacheSpec
from engine.attention.select import select_backend
from engine.core.batch import ScheduledBatch
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.loading.checkpoint import open_checkpoint
from engine.loading.loader import load_model
from engine.runner import device as devices
from engine.runner.memory import GIB, CachePlan, plan_cache
from engine.runner.model_runner import ModelRunner, PendingStep
from engine.runner.rows import RowTable

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""Called with a short phrase, how much is done, and the total; a total of 0 means that there is nothing to count."""

CPU_MAX_CACHE_BYTES = 4 * GIB
WARM_UP_SEQUENCE_ID = 0


class EngineLoop:
    """Owns model, KV cache and scheduler; not thread-safe, driven by one thread.

    Sequence ids given to `submit` must be positive and unique.
    """

    def __init__(self, config: EngineConfig, on_progress: OnProgress = lambda stage, done, total: None) -> None:
        started = time.perf_counter()
        self._device = devices.resolve_device(config.device)
        self._is_asynchronous = self._device.type == "cuda"
        torch.set_num_threads(config.num_threads or devices.available_threads())

        on_progress("reading the checkpoint", 0, 0)
        checkpoint = open_checkpoint(Path(config.model), config.load_format)
        dtype = devices.resolve_dtype(config.dtype, str(checkpoint.config.get("dtype") or ""), self._device)
        self._model = load_model(
            checkpoint,
            device=self._device,
            dtype=dtype,
            on_progress=lambda done, total: on_progress("loading weights", done, total),
        )
        on_progress("allocating the KV cache", 0, 0)
        model_config = self._model.config
        spec = CacheSpec(
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            block_size=config.block_size,
            dtype=dtype,
        )
        max_num_batched_tokens = config.max_num_batched_tokens or _default_token_budget(self._device)
        plan = self._plan_cache(config, spec, max_num_batched_tokens)
        if not config.enable_chunked_prefill:
            max_num_batched_tokens = max(max_num_batched_tokens, plan.max_model_len)
        attention = select_backend(spec, self._device)
        attention.allocate(plan.num_blocks)
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=plan.max_model_len,
                block_size=config.block_size,
                num_blocks=plan.num_blocks,
                enable_prefix_caching=config.enable_prefix_caching,
                enable_chunked_prefill=config.enable_chunked_prefill,
            )
        )
        rows = RowTable(
            max_num_seqs=config.max_num_seqs,
            max_model_len=plan.max_model_len,
            block_size=config.block_size,
            device=self._device,
        )
        self._runner = ModelRunner(self._model, attention, rows, block_size=config.block_size, seed=config.seed)
        self._in_flight: deque[tuple[ScheduledBatch, PendingStep]] = deque()
        on_progress("producing a first token", 0, 0)
        self._warm_up()
        self.facts = self._describe(config, spec, plan, time.perf_counter() - started)
        _log_facts(self.facts)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight)

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

        After an exception, an interrupt included, every sequence has ended and the engine can go on.
        """
        try:
            return self._step()
        except BaseException:
            # The scheduler counts what it scheduled as computed, and offers it to later prompts.
            self._in_flight.clear()
            self._scheduler.abort_all("The step that computed this sequence failed.")
            raise

    def _step(self) -> list[StepOutput]:
        batch = self._scheduler.schedule()
        if batch is not None:
            self._in_flight.append((batch, self._runner.launch(batch)))
            if self._is_asynchronous and len(self._in_flight) < 2:
                return []
        if not self._in_flight:
            return []
        oldest, pending = self._in_flight.popleft()
        return self._scheduler.commit(oldest, pending.wait())

    def _plan_cache(self, config: EngineConfig, spec: CacheSpec, max_num_batched_tokens: int) -> CachePlan:
        model_config = self._model.config
        max_model_len = config.max_model_len or model_config.max_position_embeddings
        if max_model_len > model_config.max_position_embeddings:
            raise InvalidParameter(
                "max_model_len",
                f"max_model_len {max_model_len:,} is beyond the {model_config.max_position_embeddings:,} positions "
                "the model was trained for; lower it.",
            )
        # Activations of the widest layer live twice at a time, logits once more for filtering.
        activation_bytes = 4 * max_num_batched_tokens * (2 * model_config.intermediate_size + model_config.hidden_size)
        logits_bytes = 3 * 4 * config.max_num_seqs * model_config.vocab_size
        return plan_cache(
            spec,
            budget_bytes=devices.memory_budget_bytes(config, self._device),
            used_bytes=self._weight_bytes() + activation_bytes + logits_bytes,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=config.num_kv_blocks,
            max_cache_bytes=CPU_MAX_CACHE_BYTES if self._device.type == "cpu" else None,
        )

    def _weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers()))

    def _warm_up(self) -> None:
        """Produce one real token, so that "ready" means the whole path has run."""
        self.submit(Prompt(WARM_UP_SEQUENCE_ID, (0,), 1, SamplingParams(temperature=0.0)))
        while self.has_work:
            self.step()
        self._scheduler.reset_stats()

    def _describe(self, config: EngineConfig, spec: CacheSpec, plan: CachePlan, load_seconds: float) -> WorkerFacts:
        return WorkerFacts(
            architecture=self._model.config.architecture,
            dtype=str(spec.dtype).removeprefix("torch."),
            device=str(self._device),
            max_model_len=plan.max_model_len,
            vocab_size=self._model.config.vocab_size,
            num_parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            weight_bytes=self._weight_bytes(),
            kv_bytes_per_token=spec.bytes_per_token,
            num_kv_blocks=plan.num_blocks,
            block_size=spec.block_size,
            max_num_seqs=config.max_num_seqs,
            load_seconds=load_seconds,
            notes=plan.notes,
        )


def _default_token_budget(device: torch.device) -> int:
    """Tokens per step: large enough to keep matrix products busy, small enough that streams do not stall."""
    return 8192 if device.type == "cuda" else 256


def _log_facts(facts: WorkerFacts) -> None:
    kind = "CPU" if facts.device == "cpu" else "GPU"
    log.info("%s KV cache size: %s tokens", kind, f"{facts.num_kv_tokens:,}")
    log.info("Maximum concurrency for %s tokens per request: %.2fx", f"{facts.max_model_len:,}", facts.max_concurrency)
    for note in facts.notes:
        log.warning("%s", note)
