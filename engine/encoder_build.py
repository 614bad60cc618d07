"""Builds an encoder's engine from its config: device, weights, the size of a step.

The counterpart of `engine.build` for models that read whole texts: there is no cache, so what the budget leaves
beside the weights goes to the workspace.  Called once by `engine.encoder_loop`; knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.api.config import EngineConfig
from engine.api.wire import WorkerFacts
from engine.attention.ragged import select_ragged_attention
from engine.build import OnProgress, memory_for_weights, prepare_device, weights_that_stay
from engine.compiled_encoder import CompiledEncoder, choose_compiled_encoder
from engine.encoder_sizing import EncoderLimits, EncoderSizer, choose_limits
from engine.loading.checkpoint import Checkpoint, open_checkpoint
from engine.loading.loader import encoder_weight_bytes, load_encoder
from engine.models.encoder import EncoderModel
from engine.models.registry import encoder_class
from engine.pooling.config import ModelPooling, read_pooling
from engine.runner import device as devices
from engine.runner.device_account import DeviceAccount
from engine.runner.encoder_runner import EncoderRunner, TorchEncoderSteps
from engine.runner.memory import MemoryUse
from engine.runner.weight_memory import WeightMemory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """A built encoder.  `pipeline_depth` is how many steps may be in flight before the oldest is waited for.

    `measure_held` says how many bytes of its device the process holds.
    """

    runner: EncoderRunner
    limits: EncoderLimits
    pooling: ModelPooling
    weights: WeightMemory
    facts: WorkerFacts
    measure_held: Callable[[], int]
    pipeline_depth: int


def build_encoder(config: EngineConfig, on_progress: OnProgress) -> EncoderParts:
    """Load the model.  Raises `UnsupportedModel`, `BrokenCheckpoint`, `InsufficientMemory` or `InvalidParameter`."""
    device = devices.resolve_device(config.device)
    in_use_before = devices.device_memory_in_use(device)
    folder = prepare_device(config, device)
    on_progress("reading the checkpoint", 0, 0)
    checkpoint = open_checkpoint(Path(config.model), config.load_format)
    pooling = read_pooling(Path(config.model))
    assert pooling is not None, "an encoder always pools"
    shape = encoder_class(checkpoint.config).config_class.from_hf(checkpoint.config)
    limits = choose_limits(config, shape, pooling, device)
    dtype = resolve_encoder_dtype(config.dtype, str(checkpoint.config.get("dtype") or ""), device)
    compiled = choose_compiled_encoder(config, shape, dtype, device, folder)
    model, weights = _load(config, checkpoint, dtype, device, compiled, on_progress)
    attention = select_ragged_attention(shape.num_heads, shape.head_dim, model.dtype, device)
    runner = EncoderRunner(TorchEncoderSteps(model, attention, pooling, device), pooling, num_types=shape.num_types)

    on_progress("measuring the workspace", 0, 0)
    account = DeviceAccount(config, model, weights, device, in_use_before)
    sizer = EncoderSizer(shape, runner, account)
    limits, use = sizer.fit(limits)
    if compiled is not None:
        on_progress("compiling the step", 0, 0)
        runner = EncoderRunner(compiled.steps(model, pooling.mode, limits), pooling, num_types=shape.num_types)
        # The compiler stays in memory once it was needed.
        use = sizer.memory_use(limits)
    facts = _describe(config, model, pooling, limits, use, device)
    for note in facts.notes:
        log.warning("%s", note)
    return EncoderParts(
        runner=runner,
        limits=limits,
        pooling=pooling,
        weights=weights,
        facts=facts,
        measure_held=account.held_bytes,
        pipeline_depth=2 if device.type == "cuda" else 1,
    )


def resolve_encoder_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The compute dtype: as for other models, but float16 on a GPU for weights in float32.

    Encoders' activations are small, and vectors in float16 are ten times nearer to float32's than in bfloat16.
    """
    if name == "auto" and device.type == "cuda" and checkpoint_dtype == "float32":
        return torch.float16
    return devices.resolve_dtype(name, checkpoint_dtype, device)


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    compiled: CompiledEncoder | None,
    on_progress: OnProgress,
) -> tuple[EncoderModel, WeightMemory]:
    kind = str(dtype).removeprefix("torch.")
    memory = memory_for_weights(config, device, encoder_weight_bytes(checkpoint, dtype), kind)
    model = load_encoder(
        checkpoint,
        device=device,
        dtype=dtype,
        on_progress=lambda done, total: on_progress("loading weights", done, total),
        packed_ops=compiled.ops if compiled is not None else None,
        memory=memory,
    )
    return model, memory or weights_that_stay(model, device)


def _describe(
    config: EngineConfig,
    model: EncoderModel,
    pooling: ModelPooling,
    limits: EncoderLimits,
    use: MemoryUse,
    device: torch.device,
) -> WorkerFacts:
    notes = (
        ("Encoders are not quantised; their weights are used as they are.",) if config.quantization == "int8" else ()
    )
    return WorkerFacts(
        architecture=model.config.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        max_model_len=limits.max_model_len,
        vocab_size=model.config.vocab_size,
        num_parameters=model.num_parameters,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=0,
        num_kv_blocks=0,
        block_size=config.block_size,
        max_num_seqs=limits.max_num_seqs,
        fixed_bytes=use.total_bytes,
        task=pooling.task,
        embedding_length=model.config.hidden_size if pooling.task == "embed" else 0,
        notes=notes,
    )
