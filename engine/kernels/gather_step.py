"""Batch preparation: from "these tokens of these rows" to the tensors a step computes on, in one launch.

One program per sequence.  The contract is `engine.kernels.gather.GatherStep`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gather import GatheredStep
from engine.kernels.launch import pdl_options, supports_pdl

_TILE = 256


@triton.jit(do_not_specialize=["num_sequences"])
def _gather_step_kernel(
    sequences,
    token_table,
    block_tables,
    token_ids,
    positions,
    slot_mapping,
    context_lens,
    num_sequences,
    row_length,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence = tl.program_id(0)
    row = tl.load(sequences + sequence)
    start = tl.load(sequences + num_sequences + sequence)
    num_tokens = tl.load(sequences + 2 * num_sequences + sequence)
    first = tl.load(sequences + 3 * num_sequences + sequence)
    is_padding = row < 0
    row64 = tl.maximum(row, 0).to(tl.int64)
    num_known = tl.where(is_padding, 0, num_tokens)
    tl.store(context_lens + sequence, tl.where(is_padding, 0, start + num_tokens))
    for done in range(0, num_tokens, TILE):
        offset = done + tl.arange(0, TILE)
        inside = offset < num_tokens
        known = offset < num_known
        position = start + offset
        token_id = tl.load(token_table + row64 * row_length + position, mask=known, other=0)
        block_id = tl.load(block_tables + row64 * max_blocks + position // BLOCK_SIZE, mask=known, other=0)
        slot = block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(token_ids + first + offset, token_id, mask=inside)
        tl.store(positions + first + offset, position, mask=inside)
        tl.store(slot_mapping + first + offset, tl.where(is_padding, -1, slot), mask=inside)


def gather_step(
    sequences: torch.Tensor,
    token_table: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    num_tokens: int,
) -> GatheredStep:
    """See `engine.kernels.gather.GatherStep`."""
    device = sequences.device
    num_sequences = sequences.shape[1]
    token_ids = torch.empty(num_tokens, dtype=torch.int32, device=device)
    positions = torch.empty_like(token_ids)
    slot_mapping = torch.empty(num_tokens, dtype=torch.int64, device=device)
    context_lens = torch.empty(num_sequences, dtype=torch.int32, device=device)
    _gather_step_kernel[(num_sequences,)](
        sequences,
        token_table,
        block_tables,
        token_ids,
        positions,
        slot_mapping,
        context_lens,
        num_sequences,
        token_table.shape[1],
        block_tables.shape[1],
        BLOCK_SIZE=block_size,
        TILE=_TILE,
        PDL=supports_pdl(device),
        num_warps=2,
        **pdl_options(device),
    )
    return GatheredStep(token_ids, positions, slot_mapping, context_lens)
