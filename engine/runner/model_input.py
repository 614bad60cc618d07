"""Turns a `ScheduledBatch` into device tensors by gathering from rows.

Built once per step by `engine.runner.model_runner`; nothing is kept between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.backend import AttentionMetadata
from engine.core.batch import ScheduledBatch
from engine.runner.rows import RowTable
from engine.runner.transfer import upload


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Device tensors of one step over T tokens.

    `token_ids` and `positions`, integers [T]; `sample_indices` int64 [N] are the flat positions whose hidden
    states are turned into logits, or pooled, None when all of them are.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sample_indices: torch.Tensor | None
    attention: AttentionMetadata


def describe_sequences(batch: ScheduledBatch) -> np.ndarray:
    """Row, first position, number of tokens and flat index of the first, of every sequence: int32 [4, S]."""
    sequences = batch.sequences
    table = np.empty((4, len(sequences)), dtype=np.int32)
    table[0] = [sequence.row for sequence in sequences]
    table[1] = [sequence.start for sequence in sequences]
    table[2] = [sequence.num_tokens for sequence in sequences]
    table[3] = np.cumsum(table[2]) - table[2]
    return table


def build_model_input(batch: ScheduledBatch, rows: RowTable) -> ModelInput:
    """Gather token ids, positions and slots of the batch; rows must be up to date."""
    table = describe_sequences(batch)
    num_tokens = int(table[2].sum())
    sequences = upload(table, rows.device)
    step = rows.gather(sequences, num_tokens)
    sample_indices = None
    if batch.num_decodes < len(batch.sequences):
        samples = np.fromiter((sequence.samples or sequence.pools for sequence in batch.sequences), dtype=bool)
        sample_indices = upload((table[3] + table[2] - 1)[samples].astype(np.int64), rows.device)
    return ModelInput(
        token_ids=step.token_ids,
        positions=step.positions,
        sample_indices=sample_indices,
        attention=AttentionMetadata(
            num_decodes=batch.num_decodes,
            slot_mapping=step.slot_mapping,
            block_tables=rows.block_tables,
            rows=sequences[0],
            context_lens=step.context_lens,
            query_starts=(*table[3].tolist(), num_tokens),
            host_context_lens=tuple((table[1] + table[2]).tolist()),
        ),
    )
