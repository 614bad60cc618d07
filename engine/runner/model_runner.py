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
from engine.runner.decode_graphs import DecodeGraphs
from engine.runner.model_input import ModelInput, build_model_input, decode_input, describe_sequences
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
    """The device side of one engine: a model, its attention backend and the row table."""

    def __init__(
        self,
        model: RunnableModel,
        attention: AttentionBackend,
        rows: RowTable,
        *,
        seed: int,
        use_graphs: bool = False,
    ) -> None:
        self._model = model
        self._attention = attention
        self._rows = rows
        self._seed = seed
        self.graphs: DecodeGraphs | None = None
        if use_graphs:
            self.graphs = DecodeGraphs(self._decode, rows.device, max_size=rows.token_ids.shape[0])

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Compute the batch; sequences that sample get their next token."""
        self._rows.apply(batch)
        if self.graphs is not None and batch.num_decodes == len(batch.sequences):
            decoded = self.graphs.run(describe_sequences(batch))
            if decoded is not None:
                logits, token_ids = decoded
                if all(self._rows.is_plain(sequence.row) for sequence in batch.sequences):
                    return PendingStep(token_ids)
                return self._sample(batch.sequences, logits)
        model_input = build_model_input(batch, self._rows)
        hidden = self._forward(model_input)
        sampling = [sequence for sequence in batch.sequences if sequence.samples]
        if not sampling:
            return PendingStep(torch.empty(0, dtype=torch.int64))
        if model_input.sample_indices is not None:
            hidden = hidden[model_input.sample_indices]
        return self._sample(sampling, self._model.logits(hidden))

    def _forward(self, model_input: ModelInput) -> torch.Tensor:
        self._attention.begin_step(model_input.attention)
        return self._model(model_input.token_ids, model_input.positions, self._attention)

    def _decode(self, sequences: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a graph captures: one token of every sequence, and the likeliest next one into its row."""
        from engine.kernels.greedy import greedy_append

        model_input = decode_input(sequences, self._rows)
        logits = self._model.logits(self._forward(model_input))
        token_ids = torch.empty(sequences.shape[1], dtype=torch.int32, device=sequences.device)
        greedy_append(logits, sequences[0], model_input.positions, self._rows.token_ids, token_ids)
        return logits, token_ids

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
