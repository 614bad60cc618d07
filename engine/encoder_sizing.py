"""Sizes an encoder's engine: how many texts and tokens a step may have.

There is no cache: on a GPU the largest step is run once, on a CPU its workspace is estimated, and where the budget
has no room for it the step shrinks, but never below the longest text.  The counterpart of `engine.sizing`; called by
`engine.encoder_build` once the weights are loaded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from engine.api.config import EngineConfig
from engine.api.errors import InsufficientMemory
from engine.api.request import Prompt
from engine.api.sampling import SamplingParams
from engine.models.encoder_config import EncoderConfig
from engine.pooling.config import ModelPooling
from engine.runner.device_account import DeviceAccount
from engine.runner.encoder_runner import EncoderRunner
from engine.runner.memory import GIB, MemoryUse

log = logging.getLogger(__name__)

_CPU_STEP_TOKENS = 512
_GPU_STEP_TOKENS = 16_384
"""Enough that products of small encoders are bound by arithmetic, and a step is over within milliseconds."""
_LEAST_STEP_TOKENS = 512
_CPU_STEP_TEXTS = 64
_GPU_STEP_TEXTS = 1024


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """The longest text in tokens, and how many texts and tokens a step may have."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def choose_limits(
    config: EngineConfig, shape: EncoderConfig, pooling: ModelPooling, device: torch.device
) -> EncoderLimits:
    """The limits asked for, or those that suit model and device.

    `max_model_len` can only lower the longest text, so that one setting may serve encoders and chat models alike.
    """
    max_model_len = min(filter(None, (config.max_model_len, pooling.max_length, shape.max_position_embeddings)))
    is_gpu = device.type == "cuda"
    num_tokens = config.max_num_batched_tokens or (_GPU_STEP_TOKENS if is_gpu else _CPU_STEP_TOKENS)
    return EncoderLimits(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs or (_GPU_STEP_TEXTS if is_gpu else _CPU_STEP_TEXTS),
        # A text is read as a whole.
        max_num_batched_tokens=max(num_tokens, max_model_len),
    )


def texts_of_largest_step(limits: EncoderLimits) -> list[Prompt]:
    """Texts that fill a step, as long as they may be."""
    length = limits.max_model_len
    count = min(limits.max_num_seqs, limits.max_num_batched_tokens // length)
    return [Prompt(number, (0,) * length, 0, SamplingParams()) for number in range(count)]


class EncoderSizer:
    """Sizes the steps of one loaded encoder, run by `runner`."""

    def __init__(self, config: EncoderConfig, runner: EncoderRunner, account: DeviceAccount) -> None:
        self._config = config
        self._runner = runner
        self._account = account

    def fit(self, limits: EncoderLimits) -> tuple[EncoderLimits, MemoryUse]:
        """The largest steps that the budget has room for, halved until they fit, and what they take.

        Raises `InsufficientMemory`.
        """
        least = max(limits.max_model_len, min(limits.max_num_batched_tokens, _LEAST_STEP_TOKENS))
        self._account.bound_allocator()
        while True:
            try:
                use = self.memory_use(limits)
                self._require(use)
                break
            except InsufficientMemory:
                if limits.max_num_batched_tokens <= least:
                    raise
            limits = replace(limits, max_num_batched_tokens=max(least, limits.max_num_batched_tokens // 2))
        self._account.bound_allocator()
        log.info("%s", use.describe(budget_bytes=self._account.budget_bytes, cache_bytes=0))
        log.info("Texts of up to %d tokens, steps of up to %d", limits.max_model_len, limits.max_num_batched_tokens)
        return limits, use

    def memory_use(self, limits: EncoderLimits) -> MemoryUse:
        """What steps of such sizes take with all else: measured on a GPU, estimated on a CPU.

        Raises `InsufficientMemory`.
        """
        account = self._account
        if account.device.type != "cuda":
            return MemoryUse(account.weight_bytes, self._estimated_workspace(limits), outside=account.held_bytes())
        texts = texts_of_largest_step(limits)
        peak = account.workspace_peak_bytes(limits.max_num_batched_tokens, lambda: self._run(texts))
        return MemoryUse(account.held_weight_bytes, peak, outside=account.measure_outside())

    def _run(self, texts: list[Prompt]) -> None:
        self._runner.launch(texts).wait()

    def _require(self, use: MemoryUse) -> None:
        budget_bytes = self._account.budget_bytes
        if use.total_bytes > budget_bytes:
            raise InsufficientMemory(
                f"Weights and workspace take {use.total_bytes / GIB:.2f} GiB, and the memory budget is "
                f"{budget_bytes / GIB:.2f} GiB; lower max_model_len, choose a smaller model, or stop others."
            )

    def _estimated_workspace(self, limits: EncoderLimits) -> int:
        """The widest layer's activations in float32: hidden states three times, and products with their inputs."""
        shape = self._config
        widths = 3 * shape.hidden_size + max(4 * shape.hidden_size, 2 * shape.intermediate_size)
        return 4 * limits.max_num_batched_tokens * widths
