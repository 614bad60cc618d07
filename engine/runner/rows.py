"""Persistent per-sequence state on the device: one row per running sequence.

A row holds all token ids of its sequence and its block table.  Steps gather what they
need from rows, and sampled tokens are written back into them, so the device never waits
for the host to learn a token.  Rows are started and extended by a `ScheduledBatch`; a row
keeps no meaning after its sequence has left.  Used by `engine.runner.model_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.core.batch import BlockUpdate, RowStart, ScheduledBatch
from engine.kernels.gather import GatheredStep, select_gather
from engine.runner.transfer import upload
from engine.sampling.settings import may_stop_too_early, takes_likeliest


class RowTable:
    """`token_ids` int32 [max_num_seqs, max_model_len]; `block_tables` int32 [max_num_seqs, blocks per sequence]."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.device = device
        self.token_ids = _zeros(max_num_seqs, max_model_len, device)
        self.block_tables = _zeros(max_num_seqs, max_blocks, device)
        self.block_size = block_size
        self._gather = select_gather(device)
        self._starts: list[RowStart | None] = [None] * max_num_seqs
        self._is_plain = [False] * max_num_seqs

    def apply(self, batch: ScheduledBatch) -> None:
        """Start rows and append block ids as the scheduler decided."""
        if batch.row_starts:
            self._start(batch.row_starts)
        if batch.block_updates:
            self._extend(batch.block_updates)

    def gather(self, sequences: torch.Tensor, num_tokens: int) -> GatheredStep:
        """Look up what `sequences` int32 [4, S] compute in a step of `num_tokens`; see `GatherStep`."""
        return self._gather(sequences, self.token_ids, self.block_tables, self.block_size, num_tokens)

    def append(self, rows: Sequence[int], positions: Sequence[int], token_ids: torch.Tensor) -> None:
        """Write `token_ids` [N] at `positions` of `rows`, where the next step gathers them.

        A sequence that has filled its context ends here: its last token needs no place and is left out.
        """
        row_length = self.token_ids.shape[1]
        fitting = [index for index, position in enumerate(positions) if position < row_length]
        if not fitting:
            return
        places = np.array([rows[index] * row_length + positions[index] for index in fitting])
        if len(fitting) < len(positions):
            token_ids = token_ids[upload(np.array(fitting), self.device)]
        self.token_ids.view(-1).index_copy_(0, upload(places, self.device), token_ids.int())

    def forget_blocks(self, num_blocks: int) -> None:
        """Let no row name a block from `num_blocks` on: what sequences that left have put there may be read as padding.

        Rows of sequences that go on are rewritten by the next batch, where their blocks have moved.
        """
        self.block_tables.clamp_(max=num_blocks - 1)

    def start_of(self, row: int) -> RowStart:
        """What the scheduler said when the sequence now in `row` took it."""
        start = self._starts[row]
        assert start is not None, f"row {row} was never started"
        return start

    def is_plain(self, row: int) -> bool:
        """Whether the next token of the sequence in `row` is the likeliest one, as the model has it."""
        return self._is_plain[row]

    def _start(self, starts: Sequence[RowStart]) -> None:
        known = upload(np.concatenate([np.array(start.token_ids, dtype=np.int32) for start in starts]), self.device)
        first = 0
        for start in starts:
            self._starts[start.row] = start
            self._is_plain[start.row] = takes_likeliest(start) and not may_stop_too_early(start)
            length = len(start.token_ids)
            self.token_ids[start.row, :length] = known[first : first + length]
            first += length

    def _extend(self, updates: Sequence[BlockUpdate]) -> None:
        max_blocks = self.block_tables.shape[1]
        places: list[int] = []
        block_ids: list[int] = []
        for update in updates:
            first = update.row * max_blocks + update.first_index
            places.extend(range(first, first + len(update.block_ids)))
            block_ids.extend(update.block_ids)
        moved = upload(np.array((places, block_ids)), self.device)
        self.block_tables.view(-1).index_copy_(0, moved[0], moved[1].int())


def _zeros(num_rows: int, length: int, device: torch.device) -> torch.Tensor:
    """int32 [num_rows, length]; on a CPU as numpy takes them from the system, which maps what is used."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_rows, length), dtype=np.int32))
    return torch.zeros((num_rows, length), dtype=torch.int32, device=device)
