"""Batch preparation in plain torch: the CPU's, and the reference of `engine.kernels.gather_step`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class GatheredStep(NamedTuple):
    """What the T tokens of S sequences need.

    `token_ids`, `positions` int32 [T]; `slot_mapping` int64 [T], -1 for padding; `context_lens` int32 [S], 0 for it.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor


class GatherStep(Protocol):
    """From "these tokens of these rows" to the tensors a step computes on.

    `sequences` int32 [4, S]: row (-1 pads the batch with a token that is computed and ignored), first position,
    number of tokens, index of the first of them in the flat batch.  `token_table` int32 [R, L], `block_tables`
    int32 [R, B].
    """

    def __call__(
        self,
        sequences: torch.Tensor,
        token_table: torch.Tensor,
        block_tables: torch.Tensor,
        block_size: int,
        num_tokens: int,
    ) -> GatheredStep: ...


def gather_with_torch(
    sequences: torch.Tensor,
    token_table: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    num_tokens: int,
) -> GatheredStep:
    """See `GatherStep`."""
    rows, starts, lengths, firsts = sequences.long()
    sequence_of_token = torch.repeat_interleave(lengths, output_size=num_tokens)
    is_padding = rows < 0
    token_rows = rows.clamp(min=0)[sequence_of_token]
    offsets = torch.arange(num_tokens, device=sequences.device) - firsts[sequence_of_token]
    positions = starts[sequence_of_token] + offsets
    blocks = block_tables[token_rows, positions // block_size].long()
    is_unused = is_padding[sequence_of_token]
    return GatheredStep(
        token_table[token_rows, positions].masked_fill(is_unused, 0),
        positions.int(),
        (blocks * block_size + positions % block_size).masked_fill(is_unused, -1),
        (starts + lengths).masked_fill(is_padding, 0).int(),
    )


def select_gather(device: torch.device) -> GatherStep:
    """One kernel on an NVIDIA GPU, plain torch elsewhere; Triton is imported only where it will be used."""
    if device.type != "cuda":
        return gather_with_torch
    from engine.kernels.gather_step import gather_step

    return gather_step
