"""Runs the texts of one step through an encoder and makes a vector or a score of each.

`launch` does not wait for the device; `PendingTexts.wait` does, so the next step may be launched before this one's
results are on the host.  Called by `engine.encoder_loop`; knows nothing of queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from engine.api.output import POOLED_OVERFLOW, StepOutput
from engine.api.request import Prompt
from engine.attention.ragged import RaggedAttention
from engine.models.encoder import EncoderModel
from engine.pooling.config import ModelPooling
from engine.pooling.vectors import finish_vectors
from engine.runner.encoder_batch import EncoderBatch, build_encoder_batch
from engine.runner.state_pooling import pool_states
from engine.runner.transfer import Download, upload


class EncoderSteps(Protocol):
    """Computes steps: with torch, or as a program that was recorded once."""

    def run(self, batch: EncoderBatch) -> torch.Tensor:
        """One row per text in the batch's order, float32: pooled states [N, H], or a classifier's logits [N, 1].

        May be overwritten by the next step if it is on the CPU.
        """
        ...


class TorchEncoderSteps:
    """Operation by operation, on any device."""

    def __init__(
        self, model: EncoderModel, attention: RaggedAttention, pooling: ModelPooling, device: torch.device
    ) -> None:
        self._model = model
        self._attention = attention
        self._mode = pooling.mode
        self._device = device

    @torch.inference_mode()
    def run(self, batch: EncoderBatch) -> torch.Tensor:
        inputs = upload(batch.inputs, self._device)
        self._attention.begin_step(batch.lengths)
        hidden = self._model(inputs[0], inputs[1], inputs[2], self._attention)
        pooled = pool_states(hidden, batch.starts, self._mode)
        if self._model.head is None:
            return pooled.float()
        logits: torch.Tensor = self._model.head(pooled.to(hidden.dtype))
        return logits.float()


class PendingTexts:
    """A launched step; `wait` returns its outputs once the device has them."""

    def __init__(self, batch: EncoderBatch, results: torch.Tensor, pooling: ModelPooling) -> None:
        self.prompts = batch.prompts
        self._pooling = pooling
        self._download = Download(results)

    def wait(self) -> list[StepOutput]:
        """One terminal output per text, in the order of `prompts`."""
        (results,) = self._download.wait()
        values = results.numpy()
        is_finite = np.isfinite(values).all(axis=1)
        if not is_finite.all():
            values = np.where(is_finite[:, None], values, np.float32(0))
        return [
            StepOutput(prompt.sequence_id, finish_reason="stop", pooled=vector.tobytes())
            if is_whole
            else StepOutput(prompt.sequence_id, finish_reason="error", error_message=POOLED_OVERFLOW)
            for prompt, vector, is_whole in zip(self.prompts, self._finish(values), is_finite, strict=True)
        ]

    def _finish(self, values: np.ndarray) -> Sequence[np.ndarray]:
        if self._pooling.task == "score":
            return list(values)
        dimensions = [prompt.pooling.dimensions if prompt.pooling is not None else None for prompt in self.prompts]
        return finish_vectors(values, dimensions, normalize=self._pooling.normalize)


class EncoderRunner:
    """The device side of one encoder."""

    def __init__(self, steps: EncoderSteps, pooling: ModelPooling, *, num_types: int) -> None:
        self._steps = steps
        self._pooling = pooling
        self._num_types = num_types

    def launch(self, prompts: Sequence[Prompt]) -> PendingTexts:
        """Compute the texts of one step."""
        batch = build_encoder_batch(prompts, num_types=self._num_types)
        return PendingTexts(batch, self._steps.run(batch), self._pooling)
