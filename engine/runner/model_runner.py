"""Runs one scheduled batch on the device: rows, inputs, forward pass, sampling.

`launch` does not wait for the device; `PendingStep.wait` does.  Sampled ids are written back
into the rows at once, so the next step may be launched before this one's ids are known to
the host.  Called by `engine.loop`; knows nothing of scheduling policy.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.api.output import TokenLogprobs
from engine.attention.backend import AttentionBackend
from engine.core.batch import SampledTokens, ScheduledBatch, ScheduledSequence
from engine.runner.model_input import build_model_input
from engine.runner.rows import RowTable
from engine.sampling.sampler import SamplingRow, sample
from engine.sampling.seeds import derive


class RunnableModel(Protocol):
    """What the runner needs of a model; `engine.models` describes the shapes."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class PendingStep:
    """A launched step; `wait` returns its tokens once the device has them."""

    def __init__(self, token_ids: torch.Tensor, logprobs: tuple[TokenLogprobs | None, ...]) -> None:
        self._token_ids = token_ids
        self._logprobs = logprobs

    def wait(self) -> SampledTokens:
        return SampledTokens(tuple(self._token_ids.tolist()), self._logprobs)


class ModelRunner:
    """The device side of one engine: a model, its attention backend and the row table."""

    def __init__(
        self, model: RunnableModel, attention: AttentionBackend, rows: RowTable, *, block_size: int, seed: int
    ) -> None:
        self._model = model
        self._attention = attention
        self._rows = rows
        self._block_size = block_size
        self._seed = seed

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Compute the batch; sequences that sample get their next token."""
        self._rows.apply(batch)
        model_input = build_model_input(batch, self._rows, self._block_size)
        self._attention.begin_step(model_input.attention)
        hidden = self._model(model_input.token_ids, model_input.positions, self._attention)

        sampling = [sequence for sequence in batch.sequences if sequence.samples]
        if not sampling:
            return PendingStep(torch.empty(0, dtype=torch.int64), ())
        logits = self._model.logits(hidden[model_input.sample_indices])
        token_ids, logprobs = sample(logits, [self._sampling_row(s) for s in sampling], self._rows.token_ids)
        self._write_back(sampling, token_ids)
        return PendingStep(token_ids, logprobs)

    def _sampling_row(self, sequence: ScheduledSequence) -> SamplingRow:
        start = self._rows.start_of(sequence.row)
        seed = start.sampling.seed
        return SamplingRow(
            start=start,
            num_tokens=sequence.start + sequence.num_tokens,
            seed=derive(self._seed, sequence.sequence_id) if seed is None else seed,
        )

    def _write_back(self, sampling: list[ScheduledSequence], token_ids: torch.Tensor) -> None:
        """Append the sampled ids to their rows, where the next step gathers them."""
        rows = torch.tensor([sequence.row for sequence in sampling], device=token_ids.device)
        ends = torch.tensor([sequence.start + sequence.num_tokens for sequence in sampling], device=token_ids.device)
        # A sequence that has filled its context ends here, and its last token needs no place.
        fits = ends < self._rows.token_ids.shape[1]
        self._rows.token_ids[rows[fits], ends[fits]] = token_ids[fits]
