"""The compiled path of an engine on the CPU: which models take it, and what it is made of.

Imports the compiled path only where a model takes it.  Called by `engine.build`; `engine.cpu` does the work.
`engine.compiled_encoder` is the counterpart for encoders.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.api.config import EngineConfig
from engine.api.errors import UnsupportedModel
from engine.attention.backend import AttentionBackend, AttentionSpec, CacheSpec
from engine.loading.checkpoint import Checkpoint
from engine.loading.loader import packs_weights, quantizes_weights
from engine.models.config import DecoderConfig
from engine.models.decoder import DecoderModel
from engine.runner.cpus import cpu_share
from engine.runner.rows import RowTable

if TYPE_CHECKING:
    from engine.cpu.ops import CompiledOps
    from engine.cpu.team import Team
    from engine.runner.recorded_steps import RecordedSteps

log = logging.getLogger(__name__)

_FLOAT_INPUTS_MULTIPLE = 16
_QUANTIZED_INPUTS_MULTIPLE = 32


class CompiledPath:
    """Ops, attention and steps of one packed model; compiled kernels are kept in `code_folder`."""

    def __init__(self, config: EngineConfig, ops: CompiledOps, code_folder: Path | None, *, is_quantized: bool) -> None:
        self.ops = ops
        self._config = config
        self._code_folder = code_folder
        self._is_quantized = is_quantized

    def cache_dtype(self) -> torch.dtype:
        """Of keys and values, with which arithmetic is float32 either way.

        float32 or half precision as was asked for; without a wish, half precision beside quantised weights alone.
        """
        is_exact = self._config.dtype == "float32" or (self._config.dtype == "auto" and not self._is_quantized)
        return torch.float32 if is_exact else torch.float16

    def attention(self, spec: AttentionSpec) -> AttentionBackend:
        from engine.attention.compiled_paged import CompiledPagedAttention

        return CompiledPagedAttention(spec, torch.device("cpu"))

    def steps(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        rows: RowTable,
        max_num_batched_tokens: int,
        *,
        makes_logits: bool,
    ) -> RecordedSteps:
        """Record the model's step, for a team of threads that starts now."""
        from engine.attention.compiled_paged import CompiledPagedAttention
        from engine.runner.recorded_steps import RecordedSteps

        assert isinstance(attention, CompiledPagedAttention)
        return RecordedSteps(
            model,
            self.ops,
            attention,
            rows,
            start_team(self._config, self._code_folder),
            max_num_batched_tokens=max_num_batched_tokens,
            makes_logits=makes_logits,
            code_folder=self._code_folder,
        )


def start_team(config: EngineConfig, code_folder: Path | None) -> Team:
    """The threads that compute, as many as the config wants; torch keeps one."""
    from engine.cpu.team import Team

    share = cpu_share()
    size = config.num_threads or share.threads
    spins = config.wait_policy == "spin" or (config.wait_policy == "auto" and size <= share.threads)
    # torch is left with sampling and heads, whose threads would wait on the cores that the team computes on.
    torch.set_num_threads(1)
    team = Team(size, spins=spins, cpus=share.cores if config.pin_threads else (), code_folder=code_folder)
    log.info("CPU threads: %d of %d cores, %s", size, len(share.cores), "spinning" if spins else "yielding")
    return team


def choose_compiled_path(
    config: EngineConfig, checkpoint: Checkpoint, shape: DecoderConfig, device: torch.device, folder: Path | None
) -> CompiledPath | None:
    """The compiled path of a model on the CPU, else None; kernels are kept in `folder`.

    A model that it does not serve is computed by torch with expanded weights instead, but refused under "int8":
    raises `UnsupportedModel`.
    """
    if not packs_weights(config.quantization, device):
        return None
    is_quantized = quantizes_weights(checkpoint, config.quantization)
    reason = _why_unsupported(config, shape, _QUANTIZED_INPUTS_MULTIPLE if is_quantized else _FLOAT_INPUTS_MULTIPLE)
    if reason is None:
        from engine.cpu.ops import CompiledOps

        return CompiledPath(config, CompiledOps(), folder, is_quantized=is_quantized)
    if config.quantization == "int8":
        raise UnsupportedModel(f"Quantised weights cannot be used here: {reason}; use --quantization none.")
    log.warning("The model computes without compiled kernels, several times slower, because %s.", reason)
    return None


def _why_unsupported(config: EngineConfig, shape: DecoderConfig, inputs_multiple: int) -> str | None:
    for name, size in (
        ("hidden size", shape.hidden_size),
        ("intermediate size", shape.intermediate_size),
        ("attention's width", shape.num_heads * shape.head_dim),
    ):
        if size % inputs_multiple:
            return f"the model's {name}, {size}, is no multiple of {inputs_multiple}"
    if importlib.util.find_spec("numba") is None:
        return "numba, which compiles the kernels, is not installed"
    from engine.attention.compiled_paged import CompiledPagedAttention

    cache = CacheSpec(shape.num_layers, shape.num_kv_heads, shape.head_dim, config.block_size, torch.float32)
    spec = AttentionSpec(cache, shape.num_heads, max_num_seqs=1)
    reasons = CompiledPagedAttention.reasons_unsupported(spec, torch.device("cpu"))
    return f"its attention is not served ({' '.join(reasons)})" if reasons else None
