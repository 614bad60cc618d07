"""Builds an engine from its config: device, weights, KV cache, scheduler, runner.

Here "auto" becomes something, and the byte budget becomes blocks.  Called once by
`engine.loop`, which drives what comes out; knows nothing of requests.  `engine.encoder_build` is its counterpart.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from engine.api.config import EngineConfig
from engine.api.errors import BrokenCheckpoint, InsufficientMemory, UnsupportedModel
from engine.api.request import Pooling
from engine.api.wire import WorkerFacts
from engine.attention.backend import AttentionBackend, AttentionSpec, CacheSpec
from engine.attention.select import select_backend
from engine.compiled_path import CompiledPath, choose_compiled_path
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.kernels.torch_ops import TorchOps
from engine.loading.checkpoint import open_checkpoint
from engine.loading.loader import load_model, weight_bytes
from engine.models.config import DecoderConfig
from engine.models.decoder import DecoderModel
from engine.models.loadable import LoadableModel
from engine.models.registry import model_class
from engine.pooling.config import ModelPooling, read_pooling
from engine.runner import device as devices
from engine.runner.cpus import cpu_share
from engine.runner.device_account import DeviceAccount
from engine.runner.device_weights import DeviceWeights, device_weights
from engine.runner.graph_sizes import GraphSizeMemory
from engine.runner.kernel_cache import cpu_cache_folder, use_kernel_cache
from engine.runner.memory import GIB, CachePlan
from engine.runner.model_runner import ModelRunner, ReplayedSteps
from engine.runner.rows import RowTable
from engine.runner.weight_memory import LastingWeights, SleeplessWeights, WeightMemory
from engine.sizing import Limits, Sizer, choose_limits, shrink_to_fit

if TYPE_CHECKING:
    from engine.runner.captured_steps import CapturedSteps

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""Called with a short phrase, how much is done, and the total; a total of 0 means that there is nothing to count."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A built engine.  `pipeline_depth` is how many steps may be in flight before the oldest is committed.

    `hidden_size` is the length of whole vectors.  `measure_held` says how many bytes of its device the process holds.
    """

    scheduler: Scheduler
    runner: ModelRunner
    attention: AttentionBackend
    weights: WeightMemory
    facts: WorkerFacts
    hidden_size: int
    pipeline_depth: int
    measure_held: Callable[[], int]


def build_engine(config: EngineConfig, on_progress: OnProgress) -> EngineParts:
    """Load the model and allocate its KV cache.

    Raises `UnsupportedModel`, `BrokenCheckpoint`, `InsufficientMemory` or `InvalidParameter`.
    """
    pooling = read_pooling(Path(config.model))
    makes_vectors = pooling is not None and pooling.task == "embed"
    if makes_vectors:
        # Graphs are of steps that sample.
        config = msgspec.structs.replace(config, enable_cuda_graphs=False)
    device = devices.resolve_device(config.device)
    in_use_before = devices.device_memory_in_use(device)
    folder = prepare_device(config, device)
    model, compiled, weights = _load_model(config, device, folder, on_progress, must_continue=not makes_vectors)
    wanted = choose_limits(config, model.config, device)
    cache_dtype = compiled.cache_dtype() if compiled is not None else model.dtype
    spec = AttentionSpec(_cache_spec(model.config, config, cache_dtype), model.config.num_heads, wanted.max_num_seqs)
    attention = compiled.attention(spec) if compiled is not None else select_backend(spec, device)

    on_progress("measuring the workspace", 0, 0)
    pooled_as = Pooling("embed") if makes_vectors else None
    account = DeviceAccount(config, model, weights, device, in_use_before, attention)
    sizer = Sizer(config, model, attention, account, pooling=pooled_as)
    limits, plan = shrink_to_fit(
        wanted, lambda tried: sizer.plan(spec.cache, tried), may_chunk=config.enable_chunked_prefill
    )
    on_progress("allocating the KV cache", 0, 0)
    attention.allocate(plan.num_blocks, plan.max_blocks)
    sizer.bound_allocator()
    rows = RowTable(
        max_num_seqs=limits.max_num_seqs,
        max_model_len=plan.longest_model_len,
        block_size=config.block_size,
        device=device,
    )
    replayed: ReplayedSteps | None = None
    if compiled is not None:
        on_progress("compiling the step", 0, 0)
        replayed = compiled.steps(model, attention, rows, limits.max_num_batched_tokens, makes_logits=not makes_vectors)
    elif attention.is_capturable and config.enable_cuda_graphs:
        replayed = _captured_steps(config, model, attention, rows, limits, folder)
    facts = _describe(spec.cache, plan, model, limits, attention, device, pooling)
    _log_facts(facts)
    return EngineParts(
        scheduler=Scheduler(_scheduler_config(config, plan, limits)),
        runner=ModelRunner(
            model,
            attention,
            rows,
            seed=config.seed,
            replayed=replayed,
            normalizes_vectors=pooling is None or pooling.normalize,
        ),
        hidden_size=model.config.hidden_size,
        attention=attention,
        weights=weights,
        facts=facts,
        pipeline_depth=2 if device.type == "cuda" else 1,
        measure_held=account.held_bytes,
    )


def prepare_device(config: EngineConfig, device: torch.device) -> Path | None:
    """Settings that must be made before the device is first used; returns where small things may be kept."""
    torch.set_num_threads(config.num_threads or cpu_share().threads)
    directory = Path(config.cache_dir) if config.cache_dir else None
    if device.type != "cuda":
        return cpu_cache_folder(directory)
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedModel(
            "Triton, which the engine needs on NVIDIA GPUs, is not installed; install it (pip install triton), "
            "or use --device cpu."
        )
    torch.cuda.set_device(device)  # Triton launches on the current device, whatever its tensors say
    budget_bytes, total_bytes = devices.memory_budget_bytes(config, device), devices.total_memory_bytes(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total_bytes), device)
    # Steps of changing size would leave holes between fixed segments, which the budget has no room for.
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return use_kernel_cache(directory, device)


def _load_model(
    config: EngineConfig, device: torch.device, folder: Path | None, on_progress: OnProgress, *, must_continue: bool
) -> tuple[DecoderModel, CompiledPath | None, WeightMemory]:
    on_progress("reading the checkpoint", 0, 0)
    checkpoint = open_checkpoint(Path(config.model), config.load_format)
    dtype = devices.resolve_dtype(config.dtype, str(checkpoint.config.get("dtype") or ""), device)
    shape = model_class(checkpoint.config).config_class.from_hf(checkpoint.config)
    if must_continue and not (shape.has_head or shape.tie_word_embeddings):
        raise BrokenCheckpoint(
            "The checkpoint lacks the head that continues a text (lm_head), and no file beside it says that the model "
            "makes vectors; pull the model again, or choose another."
        )
    compiled = choose_compiled_path(config, checkpoint, shape, device, folder)
    quantization = config.quantization if compiled is not None else None
    needed_bytes = weight_bytes(checkpoint, dtype, quantization=quantization, device=device)
    kind = str(dtype).removeprefix("torch.") if compiled is None else "packed numbers"
    memory = memory_for_weights(config, device, needed_bytes, kind)
    model = load_model(
        checkpoint,
        device=device,
        dtype=dtype,
        on_progress=lambda done, total: on_progress("loading weights", done, total),
        quantization=quantization,
        packed_ops=(lambda: compiled.ops) if compiled is not None else TorchOps,
        packed_folder=folder / "packed" if folder is not None else None,
        memory=memory,
    )
    return model, compiled, memory or weights_that_stay(model, device)


def memory_for_weights(
    config: EngineConfig, device: torch.device, needed_bytes: int, kind: str
) -> DeviceWeights | None:
    """As `device_weights`, once the budget is known to hold them; `kind` says what they are made of.

    Checked before any is read, because a process that runs out of memory is killed without a word.
    """
    budget_bytes = devices.memory_budget_bytes(config, device)
    if needed_bytes >= budget_bytes:
        raise InsufficientMemory(
            f"The weights take {needed_bytes / GIB:.2f} GiB as {kind}, and the memory budget is "
            f"{budget_bytes / GIB:.2f} GiB; choose a smaller model, or stop others."
        )
    return device_weights(device, needed_bytes, devices.total_memory_bytes(device))


def weights_that_stay(model: LoadableModel, device: torch.device) -> WeightMemory:
    """For weights that no memory of their own was found for."""
    if device.type == "cuda":
        return SleeplessWeights()
    return LastingWeights(model.weight_bytes, tuple(model.weight_maps))


def _cache_spec(shape: DecoderConfig, config: EngineConfig, dtype: torch.dtype) -> CacheSpec:
    return CacheSpec(shape.num_layers, shape.num_kv_heads, shape.head_dim, config.block_size, dtype)


def _captured_steps(
    config: EngineConfig,
    model: DecoderModel,
    attention: AttentionBackend,
    rows: RowTable,
    limits: Limits,
    folder: Path | None,
) -> CapturedSteps:
    # Imports Triton, which only GPUs need.
    from engine.runner.captured_steps import CapturedSteps

    captured = CapturedSteps(model, attention, rows, max_num_batched_tokens=limits.max_num_batched_tokens)
    _remember_graphs(captured, GraphSizeMemory(folder), config.model, model.dtype, rows.device)
    return captured


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


def _scheduler_config(config: EngineConfig, plan: CachePlan, limits: Limits) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=plan.longest_model_len,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
    )


def _describe(
    spec: CacheSpec,
    plan: CachePlan,
    model: DecoderModel,
    limits: Limits,
    attention: AttentionBackend,
    device: torch.device,
    pooling: ModelPooling | None,
) -> WorkerFacts:
    return WorkerFacts(
        architecture=model.config.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        max_model_len=plan.max_model_len,
        vocab_size=model.config.vocab_size,
        num_parameters=model.num_parameters,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=spec.bytes_per_token,
        num_kv_blocks=plan.num_blocks,
        block_size=spec.block_size,
        max_num_seqs=limits.max_num_seqs,
        fixed_bytes=plan.fixed_bytes,
        max_kv_blocks=attention.max_blocks,
        task="generate" if pooling is None else pooling.task,
        embedding_length=model.config.hidden_size if pooling is not None and pooling.task == "embed" else 0,
        notes=plan.notes,
    )


def _log_facts(facts: WorkerFacts) -> None:
    kind = "CPU" if facts.device == "cpu" else "GPU"
    log.info("%s KV cache size: %s tokens", kind, f"{facts.num_kv_tokens:,}")
    log.info("Maximum concurrency for %s tokens per request: %.2fx", f"{facts.max_model_len:,}", facts.max_concurrency)
    for note in facts.notes:
        log.warning("%s", note)
