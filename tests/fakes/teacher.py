"""`Teacher`: a model's logprobs for given tokens, computed as an engine would: paged, batched, in chunks.

The scheduler is left out; the tokens of all sequences are known from the start, and each step computes
the next piece of each.  Runs on any device with that device's own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.api.sampling import SamplingParams
from engine.attention.backend import AttentionSpec, CacheSpec
from engine.attention.select import select_backend
from engine.core.batch import BlockUpdate, RowStart, ScheduledBatch, ScheduledSequence
from engine.loading.checkpoint import open_checkpoint
from engine.loading.loader import load_model
from engine.runner.model_input import build_model_input
from engine.runner.rows import RowTable


class Teacher:
    """One loaded model with a cache for sequences of up to `max_len` tokens."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_len: int,
        max_num_seqs: int = 64,
        block_size: int = 16,
    ) -> None:
        self._device = device
        self._model = load_model(
            open_checkpoint(checkpoint), device=device, dtype=dtype, on_progress=lambda done, total: None
        )
        config = self._model.config
        cache = CacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
        self._attention = select_backend(AttentionSpec(cache, config.num_heads, max_num_seqs), device)
        self._blocks_per_row = -(-max_len // block_size)
        self._attention.allocate(max_num_seqs * self._blocks_per_row)
        self._rows = RowTable(max_num_seqs=max_num_seqs, max_model_len=max_len, block_size=block_size, device=device)

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[Sequence[int]], chunk: int) -> list[torch.Tensor]:
        """Log-softmax at every position, `chunk` tokens of each sequence a step: float32 [L, vocab] on the CPU each."""
        pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
        for start in range(0, max(map(len, sequences)), chunk):
            members = [index for index, sequence in enumerate(sequences) if len(sequence) > start]
            batch = self._batch(sequences, members, start, chunk)
            model_input = build_model_input(batch, self._rows)
            self._attention.begin_step(model_input.attention)
            hidden = self._model(model_input.token_ids, model_input.positions, self._attention)
            logprobs = self._model.logits(hidden).float().log_softmax(-1).cpu()
            counts = [scheduled.num_tokens for scheduled in batch.sequences]
            for index, piece in zip(members, logprobs.split(counts), strict=True):
                pieces[index].append(piece)
        return [torch.cat(piece) for piece in pieces]

    def _batch(self, sequences: Sequence[Sequence[int]], members: list[int], start: int, chunk: int) -> ScheduledBatch:
        scheduled = tuple(
            ScheduledSequence(row, row, start, min(chunk, len(sequences[row]) - start), samples=True) for row in members
        )
        batch = ScheduledBatch(
            step=0,
            sequences=scheduled,
            num_decodes=len(scheduled) if chunk == 1 else 0,
            row_starts=tuple(self._row_start(row, sequences[row]) for row in members) if start == 0 else (),
            block_updates=tuple(self._block_update(row) for row in members) if start == 0 else (),
        )
        self._rows.apply(batch)
        return batch

    def _row_start(self, row: int, token_ids: Sequence[int]) -> RowStart:
        return RowStart(row, row, tuple(token_ids), len(token_ids), SamplingParams(temperature=0.0), ())

    def _block_update(self, row: int) -> BlockUpdate:
        first = row * self._blocks_per_row
        return BlockUpdate(row, 0, tuple(range(first, first + self._blocks_per_row)))
