"""The compiled path of an encoder on the CPU: which encoders take it, and what it is made of.

The counterpart of `engine.compiled_path`.  Imports the compiled path only where a model takes it.  Called by
`engine.encoder_build`; `engine.cpu` does the work.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.api.config import EngineConfig
from engine.compiled_path import start_team
from engine.encoder_sizing import EncoderLimits
from engine.models.encoder import EncoderModel
from engine.models.encoder_config import EncoderConfig
from engine.pooling.config import PoolingMode

if TYPE_CHECKING:
    from engine.cpu.encoder_ops import CompiledEncoderOps
    from engine.runner.recorded_encoder import RecordedEncoderSteps

log = logging.getLogger(__name__)

_SIZES_MULTIPLE = 32
"""Inputs and outputs that the kernels multiply at once."""


class CompiledEncoder:
    """Ops and steps of one encoder; compiled kernels are kept in `code_folder`."""

    def __init__(self, config: EngineConfig, ops: CompiledEncoderOps, code_folder: Path | None) -> None:
        self.ops = ops
        self._config = config
        self._code_folder = code_folder

    def steps(self, model: EncoderModel, mode: PoolingMode, limits: EncoderLimits) -> RecordedEncoderSteps:
        """Record the model's step, for a team of threads that starts now."""
        from engine.runner.recorded_encoder import RecordedEncoderSteps

        return RecordedEncoderSteps(
            model,
            self.ops,
            mode,
            start_team(self._config, self._code_folder),
            max_num_tokens=limits.max_num_batched_tokens,
            max_num_texts=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            code_folder=self._code_folder,
        )


def choose_compiled_encoder(
    config: EngineConfig, shape: EncoderConfig, dtype: torch.dtype, device: torch.device, folder: Path | None
) -> CompiledEncoder | None:
    """The compiled path of an encoder in float32 on the CPU, else None; kernels are kept in `folder`.

    A model that it does not serve is computed by torch instead.
    """
    if device.type != "cpu":
        return None
    reason = _why_unsupported(shape, dtype)
    if reason is None:
        from engine.cpu.encoder_ops import CompiledEncoderOps

        return CompiledEncoder(config, CompiledEncoderOps(), folder)
    log.warning("The model computes without compiled kernels, two to four times slower, because %s.", reason)
    return None


def _why_unsupported(shape: EncoderConfig, dtype: torch.dtype) -> str | None:
    if dtype != torch.float32:
        return f"it was loaded as {str(dtype).removeprefix('torch.')} and not as float32"
    for name, size in (
        ("hidden size", shape.hidden_size),
        ("intermediate size", shape.intermediate_size),
        ("size of heads", shape.head_dim),
    ):
        if size % _SIZES_MULTIPLE:
            return f"the model's {name}, {size}, is no multiple of {_SIZES_MULTIPLE}"
    if importlib.util.find_spec("numba") is None:
        return "numba, which compiles the kernels, is not installed"
    from engine.cpu.isa import host_isa

    return None if host_isa() is not None else "this processor lacks AVX2 or the conversion of float16"
