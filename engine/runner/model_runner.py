"""Runs one scheduled batch on the device: rows, inputs, forward pass, sampling.

`launch` does not wait for the device; `PendingStep.wait` does.  Sampled ids are written back
into the rows at once, so the next step may be launched before this one's ids are known to
the host.  Called by `engine.loop`; knows nothing of scheduling policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.attention.backend import AttentionBackend
from engine.core.batch import SampledTokens, ScheduledBatch, ScheduledSequence
from engine.runner.model_input import build_model_input
from engine.runner.prompt_pooling import PendingPooled, pool
from engine.runner.rows import RowTable
from engine.runner.transfer import Download, upload
from engine.sampling.sampler import DeviceLogprobs, SamplingRow, sample
from engine.sampling.seeds import derive


class RunnableModel(Protocol):
    """What the runner needs of a model; `engine.models` describes the shapes."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def final_states(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """What a replayed step has for the N sequences that sample or are pooled, in batch order.

    `logits` [N, V] and the `likeliest` ids [N], empty where the model makes none; `hidden` [N, hidden_size] are hidden
    states before the final norm, None where nothing is pooled.  All are overwritten by the next step.
    """

    logits: torch.Tensor
    likeliest: torch.Tensor
    hidden: torch.Tensor | None = None


class ReplayedSteps(Protocol):
    """Steps that were prepared once and are only replayed: as CUDA graphs, or as a program on the CPU.

    A replayed step writes the likeliest token of every sequence that samples to its row.
    """

    @property
    def has_wanted(self) -> bool:
        """Whether `capture_wanted` has anything left to prepare."""
        ...

    def capture_wanted(self) -> None: ...

    def run(self, batch: ScheduledBatch) -> ReplayedStep | None:
        """Compute a step; None where it is not prepared."""
        ...


class PendingStep:
    """A launched step; `wait` returns its tokens once the device has them."""

    def __init__(
        self, token_ids: torch.Tensor, logprobs: DeviceLogprobs | None = None, pooled: PendingPooled | None = None
    ) -> None:
        self._pooled = pooled
        # First, so that the ids' arrival means that everything has arrived.
        self._logprobs = logprobs.to_host(non_blocking=True) if logprobs is not None else None
        self._download = Download(token_ids)

    def wait(self) -> SampledTokens:
        (token_ids,) = self._download.wait()
        ids = tuple(token_ids.tolist())
        logprobs = self._logprobs.by_row(len(ids)) if self._logprobs else (None,) * len(ids)
        return SampledTokens(ids, logprobs, self._pooled.wait() if self._pooled else ())


class ModelRunner:
    """The device side of one engine: a model, its attention backend and the row table.

    `replayed` are the steps that were prepared; None where none are.  `normalizes_vectors` brings the vectors of
    pooled prompts to length 1.
    """

    def __init__(
        self,
        model: RunnableModel,
        attention: AttentionBackend,
        rows: RowTable,
        *,
        seed: int,
        replayed: ReplayedSteps | None = None,
        normalizes_vectors: bool = True,
    ) -> None:
        self._model = model
        self._attention = attention
        self._rows = rows
        self._seed = seed
        self._normalizes_vectors = normalizes_vectors
        self.replayed = replayed

    @property
    def compiles(self) -> bool:
        """Whether the first use of a kernel takes much longer than the next."""
        return self._rows.device.type == "cuda"

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Compute the batch; sequences that sample get their next token."""
        self._rows.apply(batch)
        if batch.num_pooled:
            return self._launch_pooling(batch)
        sampling = [sequence for sequence in batch.sequences if sequence.samples]
        step = self.replayed.run(batch) if self.replayed is not None else None
        if step is not None:
            if all(self._rows.is_plain(sequence.row) for sequence in sampling):
                return PendingStep(step.likeliest)
            return self._sample(sampling, step.logits)
        hidden = self._compute(batch)
        return self._no_tokens() if hidden is None else self._sample(sampling, self._model.logits(hidden))

    def _launch_pooling(self, batch: ScheduledBatch) -> PendingStep:
        """A batch in which sequences are pooled; others in it may sample."""
        ends = [sequence for sequence in batch.sequences if sequence.samples or sequence.pools]
        poolings = [self._rows.start_of(sequence.row).pooling for sequence in ends]
        step = self.replayed.run(batch) if self.replayed is not None else None
        hidden = step.hidden if step is not None else self._compute(batch)
        assert hidden is not None, "what is pooled has hidden states"
        logits = step.logits if step is not None else None
        if step is None and any(pooling is None or pooling.kind == "choice" for pooling in poolings):
            logits = self._model.logits(hidden)

        is_pooled = [sequence.pools for sequence in ends]
        pooled = pool(
            [pooling for pooling in poolings if pooling is not None],
            _select(hidden, is_pooled),
            self._model.final_states,
            None if logits is None else _select(logits, is_pooled),
            normalizes=self._normalizes_vectors,
        )
        if all(is_pooled):
            return self._no_tokens(pooled)
        assert logits is not None, "what is sampled has logits"
        sampling = [sequence for sequence in ends if sequence.samples]
        return self._sample(sampling, _select(logits, [not one for one in is_pooled]), pooled)

    def _no_tokens(self, pooled: PendingPooled | None = None) -> PendingStep:
        # On the device, so that whoever waits for this step waits until it has run.
        return PendingStep(torch.empty(0, dtype=torch.int64, device=self._rows.device), pooled=pooled)

    @torch.inference_mode()
    def forget_blocks(self, num_blocks: int) -> None:
        """Note that the KV cache is about to end at `num_blocks`; see `RowTable.forget_blocks`."""
        self._rows.forget_blocks(num_blocks)

    def _compute(self, batch: ScheduledBatch) -> torch.Tensor | None:
        """Kernel by kernel: hidden states [N, hidden_size] of the N sequences that sample or are pooled, or None."""
        model_input = build_model_input(batch, self._rows)
        self._attention.begin_step(model_input.attention)
        hidden = self._model(model_input.token_ids, model_input.positions, self._attention)
        if model_input.sample_indices is None:
            return hidden
        if not len(model_input.sample_indices):
            return None
        return hidden[model_input.sample_indices]

    def _sample(
        self, sequences: Sequence[ScheduledSequence], logits: torch.Tensor, pooled: PendingPooled | None = None
    ) -> PendingStep:
        samples = sample(logits, [self._sampling_row(sequence) for sequence in sequences], self._rows.token_ids)
        rows, ends = _unzip((sequence.row, sequence.start + sequence.num_tokens) for sequence in sequences)
        self._rows.append(rows, ends, samples.token_ids)
        return PendingStep(samples.token_ids, samples.logprobs, pooled)

    def _sampling_row(self, sequence: ScheduledSequence) -> SamplingRow:
        start = self._rows.start_of(sequence.row)
        seed = start.sampling.seed
        return SamplingRow(
            start=start,
            num_tokens=sequence.start + sequence.num_tokens,
            seed=derive(self._seed, sequence.sequence_id) if seed is None else seed,
        )


def _select(values: torch.Tensor, is_wanted: Sequence[bool]) -> torch.Tensor:
    """The rows of `values` that are wanted."""
    if all(is_wanted):
        return values
    return values[upload(np.flatnonzero(is_wanted), values.device)]


def _unzip(pairs: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    firsts, seconds = zip(*pairs, strict=True)
    return list(firsts), list(seconds)
