"""How a decode step's contexts are cut into the items that the programs of decode attention handle.

The cut is made on the device, once per step, so that a captured graph serves any context lengths.  The plan kernel
estimates what each of several cuts would take: reading, starting programs in as many waves as they need, putting
items together again; and takes the best.  Also holds the launch parameters and the memory that the plan and the
attention share.  Called by the Triton attention backend and by engine/kernels/decode_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import num_multiprocessors, pdl_options, shared_memory_bytes, supports_pdl

# One item: sequence (-1: unused), first token, end, line of its block table, its sequence's first item and
# number of items, whether it holds the newest token, and one word to spare: 32 bytes, one memory sector.
ITEM_FIELDS = 8
COMBINED_ELEMENTS = 8192  # partial results that the combination holds in registers at a time

_BYTES_PER_US = 4.3e6  # what an H200 reads; other devices differ by less than the estimate errs
_REGISTERS_PER_MULTIPROCESSOR = 65536
_NUM_CUTS = tl.constexpr(32)
_CUTS_PER_DOUBLING = tl.constexpr(4)
_UNEVENNESS = tl.constexpr(0.03)  # of programs that read equally much, the last takes so much longer than the mean
_SEQUENCES_PER_PROGRAM = 16


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Launch parameters, chosen with benchmarks/kernels/decode_attention.py."""

    tile: int = 32  # tokens read at a time; a power of two, at least 16
    num_warps: int = 4
    num_stages: int = 4  # tiles on their way or in use, plus one
    programs_per_multiprocessor: int = 4  # that run at once; they share out its registers
    holds_first_tile: bool = False  # requests the first tile of an item before the query: for short items
    busy_programs: int = 2  # per multiprocessor, that keep memory busy
    spare_programs: int = 2  # per multiprocessor, beyond one for each sequence and KV head: room for a cut
    start_us: float = 1.5  # from a program's start until it reads at full rate
    combine_us: float = 2.0  # from the last item's end to the output, for few items

    @property
    def num_registers(self) -> int:
        """Per thread, so that `programs_per_multiprocessor` fit; they come by eights."""
        num_threads = self.programs_per_multiprocessor * self.num_warps * 32
        return min(_REGISTERS_PER_MULTIPROCESSOR // num_threads // 8 * 8, 255)

    def within(self, shared_memory: int, row_bytes: int) -> DecodeTuning:
        """The same with as few stages, programs and tokens less as let the tiles on their way share `shared_memory`."""
        tuning = self
        while 2 * tuning.tile * row_bytes * (tuning.num_stages - 1) * tuning.programs_per_multiprocessor > (
            0.9 * shared_memory
        ):
            if tuning.num_stages > 3:
                tuning = replace(tuning, num_stages=tuning.num_stages - 1)
            elif tuning.programs_per_multiprocessor > 1:
                tuning = replace(tuning, programs_per_multiprocessor=tuning.programs_per_multiprocessor - 1)
            elif tuning.num_stages > 2:
                tuning = replace(tuning, num_stages=2)
            elif tuning.tile > 16:
                tuning = replace(tuning, tile=tuning.tile // 2)
            else:
                break
        return tuning

    def max_items(self, num_sequences: int, num_kv_heads: int, num_multiprocessors: int) -> int:
        """The most items that the contexts are cut into; where no cut is expected to pay, few more than sequences."""
        spare = -(-self.spare_programs * num_multiprocessors // num_kv_heads)
        waves, last_wave = divmod(
            num_sequences * num_kv_heads, max(self.programs_per_multiprocessor * num_multiprocessors, 1)
        )
        if waves and 0 < last_wave < self.busy_programs * num_multiprocessors:
            spare = max(spare, num_sequences)
        return num_sequences + spare


def default_tuning(num_sequences: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> DecodeTuning:
    """The launch parameters for a batch; host-known figures only, so that a graph can be captured."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    return _best_tuning(num_sequences, row_bytes).within(shared_memory_bytes(device), row_bytes)


def _best_tuning(num_sequences: int, row_bytes: int) -> DecodeTuning:
    """What a sweep on an H200 found; rows are the keys of one token and head."""
    largest_tile = max(16, 16384 // row_bytes)
    is_wide = row_bytes > 256  # wider rows need more registers and shared memory
    if num_sequences <= 4:
        return DecodeTuning(min(32, largest_tile), 2, 4, 2 if is_wide else 3, holds_first_tile=True, spare_programs=4)
    if num_sequences <= 32:
        return DecodeTuning(min(64, largest_tile), 2, 4, 1 if is_wide else 2, spare_programs=4)
    return DecodeTuning(min(32, largest_tile), 4, 3, 2 if is_wide else 4)


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Device memory that the decode kernels of all layers and steps share, one step at a time.

    `items`       int32 [max_items, 8]           the plan of the step
    `partials`    float32 [max_items, H, D]      unnormalised output of each item
    `statistics`  float32 [max_items, 2, H]      maximum and sum of its softmax
    `counters`    int32 [max_num_seqs, Hkv]      items done; zero between launches
    `token_bytes` is the size of a token's key and value in one KV head.
    """

    items: torch.Tensor
    partials: torch.Tensor
    statistics: torch.Tensor
    counters: torch.Tensor
    token_bytes: int


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
        chosen = tuning or default_tuning(num_sequences, head_dim, dtype, device)
        return chosen.max_items(num_sequences, num_kv_heads, num_multiprocessors(device))

    max_items = max(items_needed(num_sequences) for num_sequences in range(1, max_num_seqs + 1))
    return DecodeWorkspace(
        items=torch.full((max_items, ITEM_FIELDS), -1, dtype=torch.int32, device=device),
        partials=torch.empty((max_items, num_heads, head_dim), dtype=torch.float32, device=device),
        statistics=torch.empty((max_items, 2, num_heads), dtype=torch.float32, device=device),
        counters=torch.zeros((max_num_seqs, num_kv_heads), dtype=torch.int32, device=device),
        token_bytes=2 * head_dim * dtype.itemsize,
    )


def plan_decode(
    rows: torch.Tensor, context_lens: torch.Tensor, workspace: DecodeWorkspace, tuning: DecodeTuning
) -> DecodePlan:
    """Cut the contexts of S decodes into items; one small kernel, no host synchronisation.

    rows int32 [S], -1 for padding; context_lens int32 [S], below 2**20, the newest token included, 0 for padding.
    Longer items come first, so that shorter ones fill the gaps that they leave.
    Raises ValueError when the workspace is too small for S sequences.
    """
    num_sequences, device = rows.shape[0], rows.device
    max_num_seqs, num_kv_heads = workspace.counters.shape
    num_sms = num_multiprocessors(device)
    max_items = tuning.max_items(num_sequences, num_kv_heads, num_sms)
    if num_sequences > max_num_seqs or max_items > workspace.items.shape[0]:
        raise ValueError(f"The decode workspace is too small for {num_sequences} sequences in {max_items} items")
    _, num_heads, head_dim = workspace.partials.shape
    _plan_items[(triton.cdiv(num_sequences, _SEQUENCES_PER_PROGRAM),)](
        rows,
        context_lens,
        workspace.items,
        num_sequences,
        max_items,
        num_kv_heads,
        tuning.programs_per_multiprocessor * num_sms,
        tuning.busy_programs * num_sms,
        workspace.token_bytes / _BYTES_PER_US,
        tuning.start_us,
        tuning.combine_us,
        # Of many items a further load of results, about a microsecond, for as many as registers hold.
        num_heads // num_kv_heads * head_dim / COMBINED_ELEMENTS,
        padded_sequences=max(_SEQUENCES_PER_PROGRAM, triton.next_power_of_2(num_sequences)),
        sequences_per_program=_SEQUENCES_PER_PROGRAM,
        tile=tuning.tile,
        item_fields=ITEM_FIELDS,
        pdl=supports_pdl(device),
        num_warps=4 if num_sequences <= 32 else 8,
        **pdl_options(device),
    )
    return DecodePlan(workspace, tuning, max_items)


@triton.jit
def _load_contexts(rows, context_lens, sequence, num_sequences):
    row = tl.load(rows + sequence, mask=sequence < num_sequences, other=-1)
    context = tl.load(context_lens + sequence, mask=sequence < num_sequences, other=0)
    return row, tl.where(row >= 0, context, 0)


@triton.jit
def _quotient(dividend, divisor):
    """Whole numbers in fp32, divided and rounded up; half a unit makes up for inexact division below 2**20."""
    return tl.floor((dividend + (divisor - 0.5)) / divisor)


@triton.jit
def _cut(context, chunk, tile: tl.constexpr):
    """Number and length of items, when a context is cut into the fewest of at most `chunk`, all about equal."""
    context = context.to(tl.float32)
    num_items = tl.maximum(_quotient(context, chunk.to(tl.float32)), 1)
    length = tl.maximum(_quotient(context, num_items * tile), 1) * tile
    return _quotient(context, length).to(tl.int32), length.to(tl.int32)


@triton.jit
def _choose_chunk(
    context, max_items, num_kv_heads, num_slots, num_busy,
    token_us, start_us, combine_us, combined_item_us, tile: tl.constexpr,
):  # fmt: skip
    """The largest number of tokens per item: that of the cut that takes the shortest time, by estimate.

    `num_slots` programs run at once; `num_busy` of them read as fast as all.  Reading one token of one KV head
    takes `token_us` when the whole device reads.
    """
    # The longest context in 1, 1.2, 1.4 ... 215 items; items of equal length.
    longest = tl.maximum(tl.max(context), 1)
    cut = tl.arange(0, _NUM_CUTS)
    wanted = tl.ceil(longest * tl.exp2(cut * (-1.0 / _CUTS_PER_DOUBLING))).to(tl.int32)
    most = tl.where(cut == 0, 1, tl.cdiv(longest, tl.maximum(wanted, 1)))
    chunk = tl.cdiv(longest, most * tile) * tile

    # One cut per thread of a warp: a few threads would each repeat for all cuts what does not depend on the sequence.
    num_items = tl.sum(_quotient(context.to(tl.float32)[:, None], chunk.to(tl.float32)[None, :]), 0)
    num_programs = tl.maximum(num_items, 1) * num_kv_heads
    num_tokens = tl.sum(context.to(tl.float32)) * num_kv_heads
    waves = tl.ceil(num_programs / num_slots)
    # Programs of the last wave are faster when they are few, but not without limit.
    last_wave = num_programs - (waves - 1) * num_slots
    missing = tl.maximum(num_busy - last_wave, 0) * (num_tokens / num_programs)
    read = tl.maximum(num_tokens + missing, 1.0 * chunk * num_busy)
    read += _UNEVENNESS * chunk * tl.minimum(num_programs, num_slots)
    largest_count = tl.cdiv(longest, chunk)
    combine = tl.where(largest_count > 1, combine_us + largest_count * combined_item_us, 0)
    cost = read * token_us + waves * start_us + combine
    cost = tl.where((num_items <= max_items) | (cut == 0), cost, float("inf"))
    return tl.max(tl.where(cost == tl.min(cost), chunk, 0))


@triton.jit(do_not_specialize=["num_sequences", "max_items", "num_kv_heads", "num_slots", "num_busy"])
def _plan_items(
    rows, context_lens, items, num_sequences, max_items, num_kv_heads, num_slots, num_busy,
    token_us, start_us, combine_us, combined_item_us,
    padded_sequences: tl.constexpr, sequences_per_program: tl.constexpr, tile: tl.constexpr,
    item_fields: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Write the items of one program's sequences; every program repeats the estimates over all sequences."""
    items_at_once: tl.constexpr = 32
    unused_at_once: tl.constexpr = 128
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.arange(0, padded_sequences)
    owner = tl.program_id(0) * sequences_per_program + tl.arange(0, sequences_per_program)
    _, context = _load_contexts(rows, context_lens, sequence, num_sequences)
    row, own_context = _load_contexts(rows, context_lens, owner, num_sequences)
    chunk = _choose_chunk(
        context, max_items, num_kv_heads, num_slots, num_busy,
        token_us, start_us, combine_us, combined_item_us, tile,
    )  # fmt: skip
    count, length = _cut(context, chunk, tile)
    own_count, own_length = _cut(own_context, chunk, tile)
    # Longest items first.
    is_earlier = length[:, None] > own_length[None, :]
    is_earlier |= (length[:, None] == own_length[None, :]) & (sequence[:, None] < owner[None, :])
    first_item = tl.sum(tl.where(is_earlier, count[:, None], 0), 0)

    for first in range(0, tl.max(own_count), items_at_once):
        index = first + tl.arange(0, items_at_once)[None, :]
        used = index < own_count[:, None]
        start = index * own_length[:, None]
        end = tl.minimum(start + own_length[:, None], own_context[:, None])
        record = items + (first_item[:, None] + index) * item_fields
        tl.store(record, owner[:, None] + index * 0, mask=used)
        tl.store(record + 1, start, mask=used)
        tl.store(record + 2, end, mask=used)
        tl.store(record + 3, row[:, None] + index * 0, mask=used)
        tl.store(record + 4, first_item[:, None] + index * 0, mask=used)
        tl.store(record + 5, own_count[:, None] + index * 0, mask=used)
        tl.store(record + 6, (end == own_context[:, None]).to(tl.int32), mask=used)
    unused = tl.sum(count) + tl.program_id(0) * unused_at_once
    for first in range(unused, max_items, tl.num_programs(0) * unused_at_once):
        item = first + tl.arange(0, unused_at_once)
        tl.store(items + item * item_fields, -1, mask=item < max_items)
