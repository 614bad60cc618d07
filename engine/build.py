"""Builds an engine from its config: device, weights, KV cache, scheduler, runner.

Here "auto" becomes something, and the byte budget becomes blocks.  Called once by
`engine.loop`, which drives what comes out; knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.api.config import EngineConfig
from engine.api.errors import InsufficientMemory, InvalidParameter
from engine.api.wire import WorkerFacts
from engine.attention.backend import CacheSpec
from engine.attention.select import select_backend
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.loading.checkpoint import open_checkpoint
from engine.loading.loader import load_model, weight_bytes
from engine.models.config import DecoderConfig
from engine.models.decoder import DecoderModel
from engine.runner import device as devices
from engine.runner.memory import GIB, CachePlan, plan_cache
from engine.runner.model_runner import ModelRunner
from engine.runner.rows import RowTable

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""Called with a short phrase, how much is done, and the total; a total of 0 means that there is nothing to count."""

CPU_MAX_CACHE_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A built engine.  `pipeline_depth` is how many steps may be in flight before the oldest is committed."""

    scheduler: Scheduler
    runner: ModelRunner
    facts: WorkerFacts
    pipeline_depth: int


def build_engine(config: EngineConfig, on_progress: OnProgress) -> EngineParts:
    """Load the model and allocate its KV cache.

    Raises `UnsupportedModel`, `BrokenCheckpoint`, `InsufficientMemory` or `InvalidParameter`.
    """
    device = devices.resolve_device(config.device)
    torch.set_num_threads(config.num_threads or devices.available_threads())
    model = _load_model(config, device, on_progress)

    on_progress("allocating the KV cache", 0, 0)
    spec = _cache_spec(model, config.block_size)
    token_budget = config.max_num_batched_tokens or _default_token_budget(device)
    plan = _plan_cache(config, spec, model, device, token_budget)
    attention = select_backend(spec, device)
    attention.allocate(plan.num_blocks)
    rows = RowTable(
        max_num_seqs=config.max_num_seqs,
        max_model_len=plan.max_model_len,
        block_size=config.block_size,
        device=device,
    )
    facts = _describe(config, spec, plan, model, device)
    _log_facts(facts)
    return EngineParts(
        scheduler=Scheduler(_scheduler_config(config, plan, token_budget)),
        runner=ModelRunner(model, attention, rows, seed=config.seed),
        facts=facts,
        pipeline_depth=2 if device.type == "cuda" else 1,
    )


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


def _cache_spec(model: DecoderModel, block_size: int) -> CacheSpec:
    config = model.config
    return CacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size, model.dtype)


def _plan_cache(
    config: EngineConfig, spec: CacheSpec, model: DecoderModel, device: torch.device, token_budget: int
) -> CachePlan:
    return plan_cache(
        spec,
        budget_bytes=devices.memory_budget_bytes(config, device),
        used_bytes=_weight_bytes(model) + _workspace_bytes(config, model.config, token_budget),
        max_num_seqs=config.max_num_seqs,
        max_model_len=_context_length(config, model.config),
        num_blocks=config.num_kv_blocks,
        max_cache_bytes=CPU_MAX_CACHE_BYTES if device.type == "cpu" else None,
    )


def _context_length(config: EngineConfig, model_config: DecoderConfig) -> int:
    trained_for = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > trained_for:
        raise InvalidParameter(
            "max_model_len",
            f"max_model_len {config.max_model_len:,} is beyond the {trained_for:,} positions the model was "
            "trained for; lower it.",
        )
    return config.max_model_len or trained_for


def _workspace_bytes(config: EngineConfig, model_config: DecoderConfig, token_budget: int) -> int:
    """Activations of the widest layer, two of them alive at a time, and logits with two copies for filtering."""
    activations = 4 * token_budget * (2 * model_config.intermediate_size + model_config.hidden_size)
    return activations + 3 * 4 * config.max_num_seqs * model_config.vocab_size


def _weight_bytes(model: DecoderModel) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _scheduler_config(config: EngineConfig, plan: CachePlan, token_budget: int) -> SchedulerConfig:
    if not config.enable_chunked_prefill:
        token_budget = max(token_budget, plan.max_model_len)
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=token_budget,
        max_model_len=plan.max_model_len,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
    )


def _describe(
    config: EngineConfig, spec: CacheSpec, plan: CachePlan, model: DecoderModel, device: torch.device
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
        max_num_seqs=config.max_num_seqs,
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
