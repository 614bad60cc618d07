"""Sizes an engine: how many tokens and sequences a step may have, and what memory is left for the KV cache.

On a GPU the largest step is run once, on a cache of one block, and what it held is subtracted from the
budget with everything else; on a CPU it is estimated.  Where the budget has no room for such a step and a
cache, the step shrinks.  Called by `engine.build` once the weights are loaded; the arithmetic is in
`engine.runner.memory`, the measurements are in `engine.runner.device`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.api.config import EngineConfig
from engine.api.errors import InsufficientMemory, InvalidParameter
from engine.api.request import Pooling
from engine.attention.backend import AttentionBackend, CacheSpec
from engine.core.batch import ScheduledBatch
from engine.models.config import DecoderConfig
from engine.models.decoder import DecoderModel
from engine.runner import device as devices
from engine.runner.graph_ladder import PROMPT_SIZES, decode_sizes
from engine.runner.largest_step import largest_step
from engine.runner.memory import GIB, MIB, CachePlan, MemoryUse, plan_cache
from engine.runner.model_runner import ModelRunner
from engine.runner.rows import RowTable
from engine.runner.weight_memory import WeightMemory

log = logging.getLogger(__name__)

CPU_MAX_CACHE_BYTES = 4 * GIB
GRAPH_BYTES = 8 * MIB
"""What the driver keeps for one captured graph of a few hundred kernels."""
DRIVER_BYTES = 768 * MIB
"""The most that a device is taken to have in use for the driver alone."""
SMALLEST_TOKEN_BUDGET = 512
_ROOMY_GPU_BYTES = 32 * GIB


@dataclass(frozen=True, slots=True)
class Limits:
    """What "auto" became: context length, sequences and tokens of one step."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def choose_limits(config: EngineConfig, model_config: DecoderConfig, device: torch.device) -> Limits:
    """The limits asked for, or those that suit the device.  Raises `InvalidParameter`."""
    trained_for = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > trained_for:
        raise InvalidParameter(
            "max_model_len",
            f"max_model_len {config.max_model_len:,} is beyond the {trained_for:,} positions the model was "
            "trained for; lower it.",
        )
    max_model_len = config.max_model_len or trained_for
    if max_model_len < 2:
        raise InvalidParameter("max_model_len", "max_model_len must hold a prompt and an answer: at least 2 tokens.")
    token_budget = config.max_num_batched_tokens or _default_token_budget(device)
    if not config.enable_chunked_prefill:
        token_budget = max(token_budget, max_model_len)
    max_num_seqs = config.max_num_seqs or (256 if device.type == "cuda" else 64)
    return Limits(max_model_len, max_num_seqs, token_budget)


def _default_token_budget(device: torch.device) -> int:
    """Tokens per step: large enough to keep matrix products busy, small enough that streams do not stall."""
    if device.type != "cuda":
        return 256
    return 8192 if devices.total_memory_bytes(device) >= _ROOMY_GPU_BYTES else 2048


def shrink_to_fit(
    limits: Limits, plan: Callable[[Limits], CachePlan], *, may_chunk: bool = True
) -> tuple[Limits, CachePlan]:
    """The largest limits that `plan` finds room for, halving the tokens of a step, and the plan.

    Raises what `plan` raised last, `InsufficientMemory`, when even small steps do not fit, and at once when
    prompts may not be computed in chunks.
    """
    tried = limits
    while True:
        try:
            found = plan(tried)
        except InsufficientMemory:
            if not may_chunk or tried.max_num_batched_tokens <= SMALLEST_TOKEN_BUDGET:
                raise
            tried = replace(tried, max_num_batched_tokens=tried.max_num_batched_tokens // 2)
            continue
        if tried != limits:
            note = (
                f"The memory budget leaves room for steps of {tried.max_num_batched_tokens:,} tokens instead of "
                f"{limits.max_num_batched_tokens:,}, so long prompts take longer."
            )
            found = replace(found, notes=(note, *found.notes))
        return tried, found


class Sizer:
    """Plans the cache of one loaded model; `in_use_before` is `device_memory_in_use` from before it was loaded.

    A step samples, or pools as `pooling` says.  `outside_bytes` is what the process was found to hold of a GPU beside
    torch's allocator and what is mapped.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderModel,
        weights: WeightMemory,
        attention: AttentionBackend,
        device: torch.device,
        in_use_before: int | None,
        *,
        pooling: Pooling | None = None,
    ) -> None:
        self._config = config
        self._pooling = pooling
        self._model = model
        self._attention = attention
        self._device = device
        self._in_use_before = in_use_before
        self._weights = model.weight_bytes
        self._weight_memory = weights
        self.outside_bytes = 0

    def plan(self, spec: CacheSpec, limits: Limits) -> CachePlan:
        """The cache that `limits` leave room for.  Raises `InsufficientMemory`."""
        use = self._measure(limits) if self._device.type == "cuda" else self.estimate(limits)
        budget_bytes = devices.memory_budget_bytes(self._config, self._device)
        plan = plan_cache(
            spec,
            budget_bytes=budget_bytes,
            used_bytes=use.total_bytes,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            num_blocks=self._config.num_kv_blocks,
            max_cache_bytes=CPU_MAX_CACHE_BYTES if self._device.type == "cpu" else None,
            reachable_bytes=devices.reachable_memory_bytes(self._device, use.outside, self._mapped_bytes),
            device_bytes=devices.total_memory_bytes(self._device),
        )
        log.info("%s", use.describe(budget_bytes=budget_bytes, cache_bytes=plan.num_blocks * spec.bytes_per_block))
        return plan

    def bound_allocator(self) -> None:
        """See to it that a step that needs more than was measured fails, and takes no other's share.

        torch's allocator gets what the budget leaves beside what is mapped now.
        """
        if self._device.type == "cuda" and self._config.num_kv_blocks is None:
            budget_bytes = devices.memory_budget_bytes(self._config, self._device)
            allowed_bytes = max(0, budget_bytes - self.outside_bytes - self._mapped_bytes)
            share = min(1.0, allowed_bytes / devices.total_memory_bytes(self._device))
            torch.cuda.set_per_process_memory_fraction(share, self._device)

    def held_bytes(self) -> int:
        """What this process holds of its device now; on a CPU without the weights, which are RAM in any case."""
        if self._device.type == "cpu":
            return self._own_bytes()
        return devices.held_memory_bytes(self._device, self.outside_bytes, self._mapped_bytes)

    @property
    def _mapped_bytes(self) -> int:
        return self._weight_memory.mapped_bytes + self._attention.mapped_bytes

    def estimate(self, limits: Limits) -> MemoryUse:
        """Activations of the widest layer, two of them alive at a time, and logits with two copies for filtering.

        What the process holds beside the weights is measured, since libraries and compiled kernels are most of it.
        """
        config = self._model.config
        widths = 2 * config.intermediate_size + config.hidden_size
        logits = limits.max_num_seqs * config.vocab_size if self._pooling is None else 0
        workspace = 4 * limits.max_num_batched_tokens * widths + 3 * 4 * logits
        return MemoryUse(self._weights, workspace, outside=self._own_bytes())

    def _own_bytes(self) -> int:
        """What the process holds of a CPU's memory beside the weights, of which those in mapped files never count."""
        mapped = sum(file.num_bytes for file in self._model.weight_maps)
        return max(0, devices.own_memory_bytes() - max(0, self._weights - mapped))

    def _measure(self, limits: Limits) -> MemoryUse:
        device = self._device
        max_len = min(limits.max_model_len, limits.max_num_batched_tokens)
        self._attention.allocate(1)
        self.bound_allocator()
        rows = RowTable(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=max_len,
            block_size=self._config.block_size,
            device=device,
        )
        runner = ModelRunner(self._model, self._attention, rows, seed=self._config.seed)
        batch = largest_step(limits.max_num_batched_tokens, limits.max_num_seqs, max_len, self._pooling)
        try:
            peak = devices.workspace_peak_bytes(device, lambda: _run(runner, batch))
        except torch.cuda.OutOfMemoryError as error:
            raise InsufficientMemory(
                f"There is no memory for a step of {limits.max_num_batched_tokens:,} tokens beside the weights of "
                f"{self._weights / GIB:.2f} GiB; choose a smaller model, or stop other programs that use the device."
            ) from error
        mapped_weights = self._weight_memory.mapped_bytes
        held = torch.cuda.memory_allocated(device) - (0 if mapped_weights else self._weights)
        max_blocks = -(-limits.max_model_len // self._config.block_size)
        row_bytes = 4 * limits.max_num_seqs * (limits.max_model_len + max_blocks)
        # What is in use on a device that nobody uses is the driver's own, and part of what others see in use.
        before = self._in_use_before
        outside = devices.measure_outside_bytes(device, before, mapped_bytes=self._mapped_bytes)
        self.outside_bytes = outside + min(before or 0, DRIVER_BYTES)
        has_graphs = self._attention.is_capturable and self._config.enable_cuda_graphs
        graphs = self._graph_bytes(limits.max_num_seqs) if has_graphs else 0
        return MemoryUse(
            max(self._weights, mapped_weights),
            peak + held + row_bytes,
            graphs,
            self.outside_bytes,
            self._attention.rounding_bytes,
        )

    def _graph_bytes(self, max_num_seqs: int) -> int:
        """What the graphs of all sizes keep: each its own logits, and together the activations of the largest."""
        config = self._model.config
        sizes = decode_sizes(max_num_seqs)
        logits = (sum(sizes) + len(PROMPT_SIZES)) * config.vocab_size
        widths = 3 * config.intermediate_size + 4 * config.hidden_size + 3 * config.num_heads * config.head_dim
        activations = max(*sizes, *PROMPT_SIZES) * widths
        num_graphs = len(sizes) + len(PROMPT_SIZES)
        return num_graphs * GRAPH_BYTES + (logits + activations) * self._model.dtype.itemsize


def _run(runner: ModelRunner, batch: ScheduledBatch) -> None:
    runner.launch(batch).wait()
