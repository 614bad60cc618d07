"""Builds an engine from its config: device, weights, KV cache, scheduler, runner.

Here "auto" becomes something, and the byte budget becomes blocks.  Called once by
`engine.loop`, which drives what comes out; knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.api.config import EngineConfig
from engine.api.errors import InsufficientMemory, InvalidParameter
from engine.api.wire import WorkerFacts
from engine.attention.backend import AttentionBackend, AttentionSpec, CacheSpec
from engine.attention.select import select_backend
from engine.core.batch import ScheduledBatch
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.loading.checkpoint import open_checkpoint
from engine.loading.loader import load_model, weight_bytes
from engine.models.config import DecoderConfig
from engine.models.decoder import DecoderModel
from engine.runner import device as devices
from engine.runner.graph_ladder import PROMPT_SIZES, decode_sizes
from engine.runner.graph_sizes import GraphSizeMemory
from engine.runner.kernel_cache import use_kernel_cache
from engine.runner.largest_step import largest_step
from engine.runner.memory import GIB, MIB, CachePlan, MemoryUse, plan_cache
from engine.runner.model_runner import ModelRunner
from engine.runner.rows import RowTable

if TYPE_CHECKING:
    from engine.runner.captured_steps import CapturedSteps

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""Called with a short phrase, how much is done, and the total; a total of 0 means that there is nothing to count."""

CPU_MAX_CACHE_BYTES = 4 * GIB
GRAPH_BYTES = 8 * MIB
"""What the driver keeps for one captured graph of a few hundred kernels."""
DRIVER_BYTES = 768 * MIB
"""The most that a device is taken to have in use for the driver alone."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A built engine.  `pipeline_depth` is how many steps may be in flight before the oldest is committed."""

    scheduler: Scheduler
    runner: ModelRunner
    facts: WorkerFacts
    pipeline_depth: int


@dataclass(frozen=True, slots=True)
class _Limits:
    """What "auto" became: context length, sequences and tokens of one step."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def build_engine(config: EngineConfig, on_progress: OnProgress) -> EngineParts:
    """Load the model and allocate its KV cache.

    Raises `UnsupportedModel`, `BrokenCheckpoint`, `InsufficientMemory` or `InvalidParameter`.
    """
    device = devices.resolve_device(config.device)
    in_use_before = devices.device_memory_in_use(device)
    folder = _prepare_device(config, device)
    model = _load_model(config, device, on_progress)
    limits = _limits(config, model.config, device)
    spec = AttentionSpec(_cache_spec(model, config.block_size), model.config.num_heads, limits.max_num_seqs)
    attention = select_backend(spec, device)

    on_progress("measuring the workspace", 0, 0)
    use = _memory_use(config, model, attention, limits, device, in_use_before)
    on_progress("allocating the KV cache", 0, 0)
    plan = _plan_cache(config, spec.cache, use, limits, device)
    attention.allocate(plan.num_blocks)
    runner = _runner(config, model, attention, limits, plan.max_model_len, device)
    if runner.captured is not None:
        _remember_graphs(runner.captured, GraphSizeMemory(folder), config.model, model.dtype, device)
    facts = _describe(spec.cache, plan, model, limits, device)
    _log_facts(facts)
    return EngineParts(
        scheduler=Scheduler(_scheduler_config(config, plan, limits)),
        runner=runner,
        facts=facts,
        pipeline_depth=2 if device.type == "cuda" else 1,
    )


def _prepare_device(config: EngineConfig, device: torch.device) -> Path | None:
    """Settings that must be made before the device is first used; returns where small things may be kept."""
    torch.set_num_threads(config.num_threads or devices.available_threads())
    if device.type != "cuda":
        return None
    # Steps of changing size would leave holes between fixed segments, which the budget has no room for.
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return use_kernel_cache(Path(config.cache_dir) if config.cache_dir else None, device)


def _load_model(config: EngineConfig, device: torch.device, on_progress: OnProgress) -> DecoderModel:
    on_progress("reading the checkpoint", 0, 0)
    checkpoint = open_checkpoint(Path(config.model), config.load_format)
    dtype = devices.resolve_dtype(config.dtype, str(checkpoint.config.get("dtype") or ""), device)
    # Checked first, because a process that runs out of memory is killed without a word.
    needed_bytes, budget_bytes = weight_bytes(checkpoint, dtype), devices.memory_budget_bytes(config, device)
    if needed_bytes >= budget_bytes:
        raise InsufficientMemory(
            f"The weights take {needed_bytes / GIB:.2f} GiB as {str(dtype).removeprefix('torch.')}, and the memory "
            f"budget is {budget_bytes / GIB:.2f} GiB; choose a smaller model, or stop others."
        )
    return load_model(
        checkpoint,
        device=device,
        dtype=dtype,
        on_progress=lambda done, total: on_progress("loading weights", done, total),
    )


def _limits(config: EngineConfig, model_config: DecoderConfig, device: torch.device) -> _Limits:
    trained_for = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > trained_for:
        raise InvalidParameter(
            "max_model_len",
            f"max_model_len {config.max_model_len:,} is beyond the {trained_for:,} positions the model was "
            "trained for; lower it.",
        )
    max_model_len = config.max_model_len or trained_for
    token_budget = config.max_num_batched_tokens or _default_token_budget(device)
    if not config.enable_chunked_prefill:
        token_budget = max(token_budget, max_model_len)
    max_num_seqs = config.max_num_seqs or (256 if device.type == "cuda" else 64)
    return _Limits(max_model_len, max_num_seqs, token_budget)


def _default_token_budget(device: torch.device) -> int:
    """Tokens per step: large enough to keep matrix products busy, small enough that streams do not stall."""
    return 8192 if device.type == "cuda" else 256


def _cache_spec(model: DecoderModel, block_size: int) -> CacheSpec:
    config = model.config
    return CacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size, model.dtype)


def _memory_use(
    config: EngineConfig,
    model: DecoderModel,
    attention: AttentionBackend,
    limits: _Limits,
    device: torch.device,
    in_use_before: int | None,
) -> MemoryUse:
    """What the engine holds besides its KV cache: measured on a GPU, by running the largest step; else estimated."""
    weights = _weight_bytes(model)
    if device.type != "cuda":
        # Activations of the widest layer, two of them alive at a time, and logits with two copies for filtering.
        widths = 2 * model.config.intermediate_size + model.config.hidden_size
        logits = limits.max_num_seqs * model.config.vocab_size
        return MemoryUse(weights, workspace_peak=4 * limits.max_num_batched_tokens * widths + 3 * 4 * logits)

    attention.allocate(1)
    max_len = min(limits.max_model_len, limits.max_num_batched_tokens)
    runner = _runner(config, model, attention, limits, max_len, device)
    batch = largest_step(limits.max_num_batched_tokens, limits.max_num_seqs, max_len)
    peak = devices.workspace_peak_bytes(device, lambda: _run(runner, batch))
    held = torch.cuda.memory_allocated(device) - weights
    rows = 4 * limits.max_num_seqs * (limits.max_model_len + limits.max_model_len // config.block_size)
    graphs = _graph_bytes(model, limits.max_num_seqs)
    # What is in use on a device that nobody uses is the driver's own, and part of what others see in use.
    outside = devices.measure_outside_bytes(device, in_use_before) + min(in_use_before or 0, DRIVER_BYTES)
    return MemoryUse(weights, peak + held + rows, graphs, outside)


def _graph_bytes(model: DecoderModel, max_num_seqs: int) -> int:
    """What the graphs of all sizes keep: each its own logits, and together the activations of the largest."""
    sizes = decode_sizes(max_num_seqs)
    logits = (sum(sizes) + len(PROMPT_SIZES)) * model.config.vocab_size
    config = model.config
    widths = 3 * config.intermediate_size + 4 * config.hidden_size + 3 * config.num_heads * config.head_dim
    activations = max(*sizes, *PROMPT_SIZES) * widths
    return (len(sizes) + len(PROMPT_SIZES)) * GRAPH_BYTES + (logits + activations) * model.dtype.itemsize


def _run(runner: ModelRunner, batch: ScheduledBatch) -> None:
    runner.launch(batch).wait()


def _plan_cache(
    config: EngineConfig, spec: CacheSpec, use: MemoryUse, limits: _Limits, device: torch.device
) -> CachePlan:
    budget_bytes = devices.memory_budget_bytes(config, device)
    plan = plan_cache(
        spec,
        budget_bytes=budget_bytes,
        used_bytes=use.total_bytes,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        num_blocks=config.num_kv_blocks,
        max_cache_bytes=CPU_MAX_CACHE_BYTES if device.type == "cpu" else None,
        reachable_bytes=devices.reachable_memory_bytes(device, use.outside),
    )
    log.info("%s", use.describe(budget_bytes=budget_bytes, cache_bytes=plan.num_blocks * spec.bytes_per_block))
    if device.type == "cuda" and config.num_kv_blocks is None:
        # A step that needs more than was measured frees what it can or fails alone; it never takes another's share.
        share = (budget_bytes - use.outside) / devices.total_memory_bytes(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    return plan


def _runner(
    config: EngineConfig,
    model: DecoderModel,
    attention: AttentionBackend,
    limits: _Limits,
    max_model_len: int,
    device: torch.device,
) -> ModelRunner:
    rows = RowTable(
        max_num_seqs=limits.max_num_seqs,
        max_model_len=max_model_len,
        block_size=config.block_size,
        device=device,
    )
    captured = None
    if attention.is_capturable and config.enable_cuda_graphs:
        # Imports Triton, which only GPUs need.
        from engine.runner.captured_steps import CapturedSteps

        captured = CapturedSteps(model, attention, rows)
    return ModelRunner(model, attention, rows, seed=config.seed, captured=captured)


def _remember_graphs(
    captured: CapturedSteps, memory: GraphSizeMemory, model: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Want the sizes that were used before, or at first the usual ones, and note the new ones."""
    for ladder in captured.ladders:
        key = GraphSizeMemory.key(f"{ladder.name} of {model}", str(dtype), torch.cuda.get_device_name(device))
        ladder.want(memory.load(key) or ladder.default_sizes)
        ladder.on_capture = partial(_remember, memory, key)


def _remember(memory: GraphSizeMemory, key: str, size: int) -> None:
    memory.remember(key, (size,))


def _weight_bytes(model: DecoderModel) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _scheduler_config(config: EngineConfig, plan: CachePlan, limits: _Limits) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
    )


def _describe(
    spec: CacheSpec, plan: CachePlan, model: DecoderModel, limits: _Limits, device: torch.device
) -> WorkerFacts:
    return WorkerFacts(
        architecture=model.config.architecture,
        dtype=str(spec.dtype).removeprefix("torch."),
        device=str(device),
        max_model_len=plan.max_model_len,
        vocab_size=model.config.vocab_size,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=_weight_bytes(model),
        kv_bytes_per_token=spec.bytes_per_token,
        num_kv_blocks=plan.num_blocks,
        block_size=spec.block_size,
        max_num_seqs=limits.max_num_seqs,
        notes=plan.notes,
    )


def _log_facts(facts: WorkerFacts) -> None:
    kind = "CPU" if facts.device == "cpu" else "GPU"
    log.info("%s KV cache size: %s tokens", kind, f"{facts.num_kv_tokens:,}")
    log.info("Maximum concurrency for %s tokens per request: %.2fx", f"{facts.max_model_len:,}", facts.max_concurrency)
    for note in facts.notes:
        log.warning("%s", note)
