"""How a decode step's contexts are cut into the items that the programs of decode attention handle.

The cut is made on the device, once per step, so that a captured graph serves any context lengths: sequences are cut
into items of about equal length, of which there are about as many as the GPU needs to be busy, however many
sequences there are and however long the longest is.  Also holds the launch parameters and the memory that the plan
and the attention share.  Called by the Triton attention backend and by engine/kernels/decode_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import num_multiprocessors, pdl_options, supports_pdl

# One item: sequence (-1: unused), first token, end, line of its block table, its sequence's first item and
# number of items, whether it holds the newest token, and one word to spare: 32 bytes, one memory sector.
ITEM_FIELDS = 8


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Launch parameters, chosen with benchmarks/kernels/decode_attention.py."""

    tile: int = 64  # tokens read at a time; a power of two, at least 16
    num_warps: int = 4
    num_stages: int = 4  # tiles on their way or in use, plus one
    programs_per_multiprocessor: int = 4  # the parallelism aimed at when sequences are few
    items_per_sequence: int = 2  # the number aimed at when sequences are many: evens out ragged contexts
    holds_first_tile: bool = False  # requests the first tile of an item before the query: for short items

    def target_items(self, num_sequences: int, num_kv_heads: int, num_multiprocessors: int) -> int:
        """Items that the contexts together are cut into, before each sequence's last is rounded up."""
        filling = -(-self.programs_per_multiprocessor * num_multiprocessors // num_kv_heads)
        return max(filling, self.items_per_sequence * num_sequences)


def default_tuning(num_sequences: int, head_dim: int, dtype: torch.dtype) -> DecodeTuning:
    """The launch parameters for a batch; host-known figures only, so that a graph can be captured."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    largest_tile = max(16, min(64, 16384 // row_bytes))
    if num_sequences <= 4:
        return DecodeTuning(tile=min(32, largest_tile), holds_first_tile=True)
    return DecodeTuning(tile=largest_tile, num_stages=3)


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Device memory that the decode kernels of all layers and steps share, one step at a time.

    `items`       int32 [max_items, 8]           the plan of the step
    `partials`    float32 [max_items, H, D]      unnormalised output of each item
    `statistics`  float32 [max_items, 2, H]      maximum and sum of its softmax
    `counters`    int32 [max_num_seqs, Hkv]      items done; zero between launches
    """

    items: torch.Tensor
    partials: torch.Tensor
    statistics: torch.Tensor
    counters: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How one step's contexts are cut; made by `plan_decode`, good until the next call on the same workspace."""

    workspace: DecodeWorkspace
    tuning: DecodeTuning
    max_items: int


def allocate_workspace(
    max_num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    tuning: DecodeTuning | None = None,
) -> DecodeWorkspace:
    """Memory for batches of up to `max_num_seqs` decodes; `tuning` when the default is not what will be used."""

    def items_needed(num_sequences: int) -> int:
        chosen = tuning or default_tuning(num_sequences, head_dim, dtype)
        return num_sequences + chosen.target_items(num_sequences, num_kv_heads, num_multiprocessors(device))

    max_items = max(items_needed(num_sequences) for num_sequences in range(1, max_num_seqs + 1))
    return DecodeWorkspace(
        items=torch.full((max_items, ITEM_FIELDS), -1, dtype=torch.int32, device=device),
        partials=torch.empty((max_items, num_heads, head_dim), dtype=torch.float32, device=device),
        statistics=torch.empty((max_items, 2, num_heads), dtype=torch.float32, device=device),
        counters=torch.zeros((max_num_seqs, num_kv_heads), dtype=torch.int32, device=device),
    )


def plan_decode(
    rows: torch.Tensor, context_lens: torch.Tensor, workspace: DecodeWorkspace, tuning: DecodeTuning
) -> DecodePlan:
    """Cut the contexts of S decodes into items; one small kernel, no host synchronisation.

    rows int32 [S], -1 for padding; context_lens int32 [S], the newest token included, 0 for padding.
    Raises ValueError when the workspace is too small for S sequences.
    """
    num_sequences, device = rows.shape[0], rows.device
    max_num_seqs, num_kv_heads = workspace.counters.shape
    target = tuning.target_items(num_sequences, num_kv_heads, num_multiprocessors(device))
    max_items = num_sequences + target
    if num_sequences > max_num_seqs or max_items > workspace.items.shape[0]:
        raise ValueError(f"The decode workspace is too small for {num_sequences} sequences in {max_items} items")
    padded_sequences = max(16, triton.next_power_of_2(num_sequences))
    items_per_program = max(32, min(256, 16384 // padded_sequences))
    _plan_items[(triton.cdiv(max_items, items_per_program),)](
        rows,
        context_lens,
        workspace.items,
        num_sequences,
        target,
        max_items,
        padded_sequences=padded_sequences,
        items_per_program=items_per_program,
        tile=tuning.tile,
        item_fields=ITEM_FIELDS,
        pdl=supports_pdl(device),
        num_warps=4,
        **pdl_options(device),
    )
    return DecodePlan(workspace, tuning, max_items)


@triton.jit
def _item_length(context, chunk, tile: tl.constexpr):
    """Tokens per item when a context is cut into the fewest items of at most `chunk`, all about equal."""
    num_items = tl.maximum(tl.cdiv(context, chunk), 1)
    return tl.maximum(tl.cdiv(context, num_items * tile), 1) * tile


@triton.jit(do_not_specialize=["num_sequences", "target_items", "max_items"])
def _plan_items(
    rows,
    context_lens,
    items,
    num_sequences,
    target_items,
    max_items,
    padded_sequences: tl.constexpr,
    items_per_program: tl.constexpr,
    tile: tl.constexpr,
    item_fields: tl.constexpr,
    pdl: tl.constexpr,
):
    """Write the items of one program's share; every program repeats the small sums over all sequences."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.arange(0, padded_sequences)
    row = tl.load(rows + sequence, mask=sequence < num_sequences, other=-1)
    context = tl.load(context_lens + sequence, mask=row >= 0, other=0)
    chunk = tl.maximum(tl.cdiv(tl.sum(context), target_items * tile), 1) * tile
    end_item = tl.cumsum(tl.cdiv(context, _item_length(context, chunk, tile)))

    item = tl.program_id(0) * items_per_program + tl.arange(0, items_per_program)
    earlier = end_item[None, :] <= item[:, None]
    owner = tl.sum(earlier.to(tl.int32), 1)
    first_item = tl.max(tl.where(earlier, end_item[None, :], 0), 1)
    used = owner < num_sequences
    row = tl.load(rows + owner, mask=used, other=-1)
    context = tl.load(context_lens + owner, mask=used, other=0)
    length = _item_length(context, chunk, tile)
    start = (item - first_item) * length
    end = tl.minimum(start + length, context)

    record = items + item * item_fields
    tl.store(record, tl.where(used, owner, -1), mask=item < max_items)
    used &= item < max_items
    tl.store(record + 1, start, mask=used)
    tl.store(record + 2, end, mask=used)
    tl.store(record + 3, row, mask=used)
    tl.store(record + 4, first_item, mask=used)
    tl.store(record + 5, tl.cdiv(context, length), mask=used)
    tl.store(record + 6, (end == context).to(tl.int32), mask=used)
