"""Sizes an engine: how many tokens and sequences a step may have, and what memory is left for the KV cache.

On a GPU the largest step is run once, on a cache of one block, and what it held is subtracted from the
budget with everything else; on a CPU it is estimated.  Where the budget has no room for such a step and a
cache, the step shrinks.  Called by `engine.build` once the weights are loaded; the arithmetic is in
`engine.runner.memory`, the measurements are in `engine.runner.device_account`.
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
from engine.core.step_sizes import PROMPT_SIZES, decode_sizes
from engine.models.config import DecoderConfig
from engine.models.decoder import DecoderModel
from engine.runner import device as devices
from engine.runner.device_account import DeviceAccount
from engine.runner.largest_step import largest_step
from engine.runner.memory import GIB, MIB, CachePlan, MemoryUse, plan_cache
from engine.runner.model_runner import ModelRunner
from engine.runner.rows import RowTable

log = logging.getLogger(__name__)

CPU_MAX_CACHE_BYTES = 4 * GIB
"""Of a share of RAM; a budget that is given in bytes is meant as it is."""
GRAPH_BYTES = 8 * MIB
"""What the driver keeps for one captured graph of a few hundred kernels."""
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
    """Plans the cache of one loaded model, whose steps sample, or pool as `pooling` says."""

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderModel,
        attention: AttentionBackend,
        account: DeviceAccount,
        *,
        pooling: Pooling | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._attention = attention
        self._account = account
        self._pooling = pooling

    def plan(self, spec: CacheSpec, limits: Limits) -> CachePlan:
        """The cache that `limits` leave room for.  Raises `InsufficientMemory`."""
        account, device = self._account, self._account.device
        use = self._measure(limits) if device.type == "cuda" else self._estimate(limits)
        plan = plan_cache(
            spec,
            budget_bytes=account.budget_bytes,
            used_bytes=use.total_bytes,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            num_blocks=self._config.num_kv_blocks,
            max_cache_bytes=self._most_cache_bytes,
            reachable_bytes=account.reachable_bytes(),
            device_bytes=devices.total_memory_bytes(device),
        )
        cache_bytes = plan.num_blocks * spec.bytes_per_block
        log.info("%s", use.describe(budget_bytes=account.budget_bytes, cache_bytes=cache_bytes))
        return plan

    @property
    def _most_cache_bytes(self) -> int | None:
        is_share_of_ram = self._account.device.type == "cpu" and self._config.memory_budget_bytes is None
        return CPU_MAX_CACHE_BYTES if is_share_of_ram else None

    def bound_allocator(self) -> None:
        """See `DeviceAccount.bound_allocator`; a number of blocks that was asked for is beyond any budget."""
        if self._config.num_kv_blocks is None:
            self._account.bound_allocator()

    def _estimate(self, limits: Limits) -> MemoryUse:
        """Activations of the widest layer, two of them alive at a time, and logits with two copies for filtering.

        What the process holds beside the weights is measured, since libraries and compiled kernels are most of it.
        """
        config = self._model.config
        widths = 2 * config.intermediate_size + config.hidden_size
        logits = limits.max_num_seqs * config.vocab_size if self._pooling is None else 0
        workspace = 4 * limits.max_num_batched_tokens * widths + 3 * 4 * logits
        return MemoryUse(self._account.weight_bytes, workspace, outside=self._account.held_bytes())

    def _measure(self, limits: Limits) -> MemoryUse:
        account, device = self._account, self._account.device
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
        peak = account.workspace_peak_bytes(limits.max_num_batched_tokens, lambda: _run(runner, batch))
        max_blocks = -(-limits.max_model_len // self._config.block_size)
        row_bytes = 4 * limits.max_num_seqs * (limits.max_model_len + max_blocks)
        workspace = peak + account.allocated_bytes() + row_bytes
        has_graphs = self._attention.is_capturable and self._config.enable_cuda_graphs
        return MemoryUse(
            account.held_weight_bytes,
            workspace,
            graphs_reserve=self._graph_bytes(limits.max_num_seqs) if has_graphs else 0,
            outside=account.measure_outside(),
            rounding=self._attention.rounding_bytes,
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
