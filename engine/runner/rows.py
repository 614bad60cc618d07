"""Persistent per-sequence state on the device: one row per running sequence.

A row holds all token ids of its sequence and its block table.  Steps gather what they
need from rows, and sampled tokens are written back into them, so the device never waits
for the host to learn a token.  Rows are started and extended by a `ScheduledBatch`; a row
keeps no meaning after its sequence has left.  Used by `engine.runner.model_runner`.
"""

from __future__ import annotations

import torch

from engine.core.batch import RowStart, ScheduledBatch


class RowTable:
    """`token_ids` int64 [max_num_seqs, max_model_len]; `block_tables` int32 [max_num_seqs, blocks per sequence]."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.device = device
        self.token_ids = torch.zeros((max_num_seqs, max_model_len), dtype=torch.int64, device=device)
        self.block_tables = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self._starts: list[RowStart | None] = [None] * max_num_seqs

    def apply(self, batch: ScheduledBatch) -> None:
        """Start rows and append block ids as the scheduler decided."""
        for start in batch.row_starts:
            self._starts[start.row] = start
            known = torch.tensor(start.token_ids, dtype=torch.int64)
            self.token_ids[start.row, : len(start.token_ids)] = known.to(self.device)
        for update in batch.block_updates:
            last_index = update.first_index + len(update.block_ids)
            block_ids = torch.tensor(update.block_ids, dtype=torch.int32)
            self.block_tables[update.row, update.first_index : last_index] = block_ids.to(self.device)

    def start_of(self, row: int) -> RowStart:
        """What the scheduler said when the sequence now in `row` took it."""
        start = self._starts[row]
        assert start is not None, f"row {row} was never started"
        return start
