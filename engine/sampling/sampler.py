"""Chooses the next token of every sampling sequence of a step, and reports logprobs on request.

Nothing here waits for the device: parameters go there in one copy, and tokens and logprobs stay
there until the caller fetches them.  The sampler reads rows but keeps no state; it is called by
`engine.runner.model_runner` once per step.  On a GPU the work is done by `engine.kernels.adjust`
and `engine.kernels.sample`, elsewhere by `engine.sampling.adjust` and `engine.sampling.filters`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.sampling.adjust import adjust
from engine.sampling.filters import choose
from engine.sampling.logprobs import DeviceLogprobs, HostLogprobs, ModelLogprobs
from engine.sampling.settings import SamplingRow, StepSettings, build_settings, is_plain

__all__ = ["DeviceLogprobs", "HostLogprobs", "Samples", "SamplingRow", "sample"]


@dataclass(frozen=True, slots=True)
class Samples:
    """What a step sampled, on the device: `token_ids` int64 [N]; `logprobs` is None when no row asked."""

    token_ids: torch.Tensor
    logprobs: DeviceLogprobs | None = None


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: torch.Tensor) -> Samples:
    """Sample one token per row.

    logits [N, V] in float32, bfloat16 or float16, contiguous, which may be overwritten; `token_ids` int32 or int64
    [max_num_seqs, max_model_len] is the row table's.
    """
    steps = _steps_for(logits.device)
    if all(map(is_plain, rows)):
        return Samples(steps.likeliest(logits))
    settings = build_settings(rows, logits.shape[1], logits.device)
    model_logprobs = ModelLogprobs(logits, rows, settings.reporting) if len(settings.reporting) else None
    if settings.adjusts:
        # In half precision a small penalty would vanish in rounding.
        logits = logits.float()
        steps.adjust(logits, settings, token_ids)
    chosen = steps.choose(logits, settings) if settings.any_draws else steps.likeliest(logits)
    return Samples(chosen, model_logprobs.of(chosen) if model_logprobs else None)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The three steps of sampling as one kind of device does them."""

    likeliest: Callable[[torch.Tensor], torch.Tensor]
    adjust: Callable[[torch.Tensor, StepSettings, torch.Tensor], None]
    choose: Callable[[torch.Tensor, StepSettings], torch.Tensor]


def _steps_for(device: torch.device) -> _Steps:
    if device.type == "cuda":
        # Triton is imported only where it is used.
        from engine.kernels.adjust import adjust as adjust_on_gpu
        from engine.kernels.greedy import likeliest
        from engine.kernels.sample import choose as choose_on_gpu

        return _Steps(likeliest, adjust_on_gpu, choose_on_gpu)
    return _Steps(lambda logits: logits.argmax(-1), adjust, choose)
