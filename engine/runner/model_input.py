"""Turns a `ScheduledBatch` into device tensors by gathering from rows.

Built once per step by `engine.runner.model_runner`; nothing is kept between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.attention.backend import AttentionMetadata
from engine.core.batch import ScheduledBatch
from engine.runner.rows import RowTable


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Device tensors of one step over T tokens, N of whose sequences sample.

    `token_ids` and `positions` int64 [T]; `sample_indices` int64 [N] are the flat positions
    whose hidden states are turned into logits.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sample_indices: torch.Tensor
    attention: AttentionMetadata


def build_model_input(batch: ScheduledBatch, rows: RowTable, block_size: int) -> ModelInput:
    """Gather token ids, positions and slots of the batch; rows must be up to date."""
    device = rows.device
    sequences = batch.sequences
    query_starts = (0, *accumulate(sequence.num_tokens for sequence in sequences))
    row_of_sequence = torch.tensor([sequence.row for sequence in sequences], device=device)
    starts = torch.tensor([sequence.start for sequence in sequences], device=device)

    if batch.num_decodes == len(sequences):
        token_rows, positions = row_of_sequence, starts
    else:
        lengths = torch.tensor([sequence.num_tokens for sequence in sequences], device=device)
        sequence_of_token = torch.repeat_interleave(lengths)
        first_tokens = torch.tensor(query_starts[:-1], device=device)
        offsets = torch.arange(query_starts[-1], device=device) - first_tokens[sequence_of_token]
        token_rows = row_of_sequence[sequence_of_token]
        positions = starts[sequence_of_token] + offsets

    blocks = rows.block_tables[token_rows, positions // block_size].long()
    return ModelInput(
        token_ids=rows.token_ids[token_rows, positions],
        positions=positions,
        sample_indices=torch.tensor(
            [query_starts[index + 1] - 1 for index, sequence in enumerate(sequences) if sequence.samples],
            dtype=torch.int64,
            device=device,
        ),
        attention=AttentionMetadata(
            num_decodes=batch.num_decodes,
            slot_mapping=blocks * block_size + positions % block_size,
            block_tables=rows.block_tables[row_of_sequence],
            query_starts=query_starts,
            context_lens=tuple(sequence.start + sequence.num_tokens for sequence in sequences),
        ),
    )
