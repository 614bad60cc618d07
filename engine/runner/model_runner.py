"""Runs one scheduled batch on the device: rows, inputs, forward pass, sampling.

`launch` does not wait for the device; `PendingStep.wait` does.  Sampled ids are written back
into the rows at once, so the next step may be launched before this one's ids are known to
the host.  Called by `engine.loop`; knows nothing of scheduling policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from engine.attention.backend import AttentionBackend
from engine.core.batch import SampledTokens, ScheduledBatch, ScheduledSequence
from engine.runner.model_input import build_model_input
from engine.runner.rows import RowTable
from engine.runner.transfer import Download
from engine.sampling.sampler import DeviceLogprobs, SamplingRow, sample
from engine.sampling.seeds import derive


class RunnableModel(Protocol):
    """What the runner needs of a model; `engine.models` describes the shapes."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class ReplayedSteps(Protocol):
    """Steps that were prepared once and are only replayed: as CUDA graphs, or as a program on the CPU.

    A replayed step writes the likeliest token of every sequence that samples to its row.
    """

    @property
    def has_wanted(self) -> bool:
        """Whether `capture_wanted` has anything left to prepare."""
        ...

    def capture_wanted(self) -> None: ...

    def run(self, batch: ScheduledBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits [N, V] and likeliest ids [N] of the N sequences that sample; None where the step is not prepared."""
        ...


class PendingStep:
    """A launched step; `wait` returns its tokens once the device has them."""

    def __init__(self, token_ids: torch.Tensor, logprobs: DeviceLogprobs | None = None) -> None:
        # First, so that the ids' arrival means that everything has arrived.
        self._logprobs = logprobs.to_host(non_blocking=True) if logprobs is not None else None
        self._download = Download(token_ids)

    def wait(self) -> SampledTokens:
        (token_ids,) = self._download.wait()
        ids = tuple(token_ids.tolist())
        return SampledTokens(ids, self._logprobs.by_row(len(ids)) if self._logprobs else (None,) * len(ids))


class ModelRunner:
    """The device side of one engine: a model, its attention backend and the row table.

    `replayed` are the steps that were prepared; None where none are.
    """

    def __init__(
        self,
        model: RunnableModel,
        attention: AttentionBackend,
        rows: RowTable,
        *,
        seed: int,
        replayed: ReplayedSteps | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._rows = rows
        self._seed = seed
        self.replayed = replayed

    @property
    def compiles(self) -> bool:
        """Whether the first use of a kernel takes much longer than the next."""
        return self._rows.device.type == "cuda"

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Compute the batch; sequences that sample get their next token."""
        self._rows.apply(batch)
        sampling = [sequence for sequence in batch.sequences if sequence.samples]
        outputs = self.replayed.run(batch) if self.replayed is not None else None
        if outputs is not None:
            logits, likeliest = outputs
            if all(self._rows.is_plain(sequence.row) for sequence in sampling):
                return PendingStep(likeliest)
            return self._sample(sampling, logits)
        computed = self._compute(batch)
        if computed is None:
            # On the device, so that whoever waits for this step waits until it has run.
            return PendingStep(torch.empty(0, dtype=torch.int64, device=self._rows.device))
        return self._sample(sampling, computed)

    @torch.inference_mode()
    def forget_blocks(self, num_blocks: int) -> None:
        """Note that the KV cache is about to end at `num_blocks`; see `RowTable.forget_blocks`."""
        self._rows.forget_blocks(num_blocks)

    def _compute(self, batch: ScheduledBatch) -> torch.Tensor | None:
        """Kernel by kernel: logits [N, V] of the N sequences that sample, or None when none does."""
        model_input = build_model_input(batch, self._rows)
        self._attention.begin_step(model_input.attention)
        hidden = self._model(model_input.token_ids, model_input.positions, self._attention)
        if model_input.sample_indices is None:
            return self._model.logits(hidden)
        if not len(model_input.sample_indices):
            return None
        return self._model.logits(hidden[model_input.sample_indices])

    def _sample(self, sequences: Sequence[ScheduledSequence], logits: torch.Tensor) -> PendingStep:
        samples = sample(logits, [self._sampling_row(sequence) for sequence in sequences], self._rows.token_ids)
        rows, ends = _unzip((sequence.row, sequence.start + sequence.num_tokens) for sequence in sequences)
        self._rows.append(rows, ends, samples.token_ids)
        return PendingStep(samples.token_ids, samples.logprobs)

    def _sampling_row(self, sequence: ScheduledSequence) -> SamplingRow:
        start = self._rows.start_of(sequence.row)
        seed = start.sampling.seed
        return SamplingRow(
            start=start,
            num_tokens=sequence.start + sequence.num_tokens,
            seed=derive(self._seed, sequence.sequence_id) if seed is None else seed,
        )


def _unzip(pairs: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    firsts, seconds = zip(*pairs, strict=True)
    return list(firsts), list(seconds)
