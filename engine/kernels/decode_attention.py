"""Decode attention over the paged KV cache: one token per sequence, on NVIDIA GPUs, in Triton.

`plan_decode` runs once per step and cuts the contexts of all sequences into items of about equal length, on the
device, so that a captured graph serves any context lengths.  `decode_attention` runs once per layer: it normalises
and rotates the newest token's query and key, stores that key and value in the cache, and attends.  Each program
handles one item of one KV head; the last program of a sequence to finish combines the items (split KV, as in
"Flash-Decoding", https://pytorch.org/blog/flash-decoding/), so there is no second kernel.

Knows nothing of layers, scheduling or who owns the cache.  Called by the Triton attention backend.
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
_ITEM_FIELDS = 8
_QUERY_ROWS = 16  # the smallest tile a tensor core takes; holds the query heads of one KV head
_COMBINE_ELEMENTS = 8192  # partial results the combination holds in registers at a time


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Launch parameters, chosen with benchmarks/kernels/decode_attention.py."""

    tile: int = 64  # tokens read at a time; a power of two, at least 16
    num_warps: int = 4
    num_stages: int = 4  # one is spent on the block table, which is read before the keys
    programs_per_multiprocessor: int = 4  # the parallelism aimed at when sequences are few
    items_per_sequence: int = 2  # the number aimed at when sequences are many: evens out ragged contexts

    def target_items(self, num_sequences: int, num_kv_heads: int, num_multiprocessors: int) -> int:
        """Items that the contexts together are cut into, before each sequence's last is rounded up."""
        filling = -(-self.programs_per_multiprocessor * num_multiprocessors // num_kv_heads)
        return max(filling, self.items_per_sequence * num_sequences)


def default_tuning(num_sequences: int, head_dim: int, dtype: torch.dtype) -> DecodeTuning:
    """The launch parameters for a batch; host-known figures only, so that a graph can be captured."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    largest_tile = max(16, min(64, 16384 // row_bytes))
    return DecodeTuning(tile=min(32, largest_tile) if num_sequences <= 4 else largest_tile)


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
        items=torch.full((max_items, _ITEM_FIELDS), -1, dtype=torch.int32, device=device),
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
        item_fields=_ITEM_FIELDS,
        pdl=supports_pdl(device),
        num_warps=4,
        **pdl_options(device),
    )
    return DecodePlan(workspace, tuning, max_items)


def decode_attention(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    norm_eps: float,
    out: torch.Tensor,
) -> None:
    """Store the newest keys and values of the planned sequences, then attend; one kernel.

    qkv [T, (H + 2 Hkv) D], the projection's output, the planned decodes first; key_cache and value_cache
    [num_blocks, Hkv, block_size, D] of one layer; block_tables int32 [lines, max_blocks]; slot_mapping int64 [T];
    cos and sin float32 [T, D / 2]; query_norm and key_norm [D], RMS norm weights of each head, or None;
    out [T, H D].  Lines of `out` whose sequence is padding are left as they are.
    """
    workspace, tuning, device = plan.workspace, plan.tuning, qkv.device
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    group = qkv.shape[1] // (num_kv_heads * head_dim) - 2
    assert workspace.partials.shape[1:] == (num_kv_heads * group, head_dim)
    assert group <= _QUERY_ROWS
    assert qkv.stride(0) == qkv.shape[1] and out.stride(0) == num_kv_heads * group * head_dim
    assert key_cache.is_contiguous() and value_cache.is_contiguous() and block_tables.stride(1) == 1
    padded_dim, padded_group = triton.next_power_of_2(head_dim), triton.next_power_of_2(group)
    _attend_item[(num_kv_heads, plan.max_items)](
        qkv,
        key_cache,
        value_cache,
        block_tables,
        workspace.items,
        slot_mapping,
        cos,
        sin,
        qkv if query_norm is None else query_norm,
        qkv if key_norm is None else key_norm,
        norm_eps,
        out,
        workspace.partials,
        workspace.statistics,
        workspace.counters,
        block_tables.stride(0),
        num_kv_heads=num_kv_heads,
        group=group,
        padded_group=padded_group,
        head_dim=head_dim,
        padded_dim=padded_dim,
        block_size=block_size,
        tile=tuning.tile,
        query_rows=_QUERY_ROWS,
        combined_items=max(2, _COMBINE_ELEMENTS // (padded_group * padded_dim)),
        normalise=query_norm is not None,
        item_fields=_ITEM_FIELDS,
        pdl=supports_pdl(device),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **pdl_options(device),
    )


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


@triton.jit
def _rotated(
    head, present, cos, sin, norm_weight, eps, head_dim: tl.constexpr, padded_dim: tl.constexpr, normalise: tl.constexpr
):
    """Heads [rows, D] at the pointers `head` [rows, 1], normalised if asked and rotated, in fp32.

    The partner of each element, half a head away, is loaded beside it, so that the result is one tile.
    """
    half: tl.constexpr = head_dim // 2
    dim = tl.arange(0, padded_dim)[None, :]
    inside = dim < head_dim
    partner_dim = tl.where(dim < half, dim + half, dim - half)
    value = tl.load(head + dim, mask=present & inside, other=0).to(tl.float32)
    partner = tl.load(head + partner_dim, mask=present & inside, other=0).to(tl.float32)
    frequency = tl.where(dim < half, dim, dim - half)
    cosine = tl.load(cos + frequency, mask=inside, other=0)
    sine = tl.load(sin + frequency, mask=inside, other=0)
    if normalise:
        scale = tl.rsqrt(tl.sum(value * value, 1) / head_dim + eps)[:, None]
        value *= scale * tl.load(norm_weight + dim, mask=inside, other=0).to(tl.float32)
        partner *= scale * tl.load(norm_weight + partner_dim, mask=inside, other=0).to(tl.float32)
    return value * cosine + partner * tl.where(dim < half, -sine, sine)


@triton.jit
def _combined(
    partials,
    statistics,
    num_items,
    item_stride,
    statistics_stride,
    sum_offset,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    combined_items: tl.constexpr,
):
    """Normalised output [padded_group, padded_dim] of all items of one sequence and KV head.

    Reads past the first-level cache, where another program's results do not show.
    """
    head = tl.arange(0, padded_group)
    dim = tl.arange(0, padded_dim)
    element = head[None, :, None] * head_dim + dim[None, None, :]
    inside = (head < group)[None, :, None] & (dim < head_dim)[None, None, :]
    maximum = tl.full((padded_group,), float("-inf"), tl.float32)
    total = tl.zeros((padded_group,), tl.float32)
    output = tl.zeros((padded_group, padded_dim), tl.float32)
    for first in range(0, num_items, combined_items):
        item = first + tl.arange(0, combined_items)
        present = item < num_items
        partial = tl.load(
            partials + item[:, None, None] * item_stride + element,
            mask=present[:, None, None] & inside,
            other=0,
            cache_modifier=".cg",
        )
        statistic = statistics + item[:, None] * statistics_stride + head[None, :]
        valid = present[:, None] & (head < group)[None, :]
        item_maximum = tl.load(statistic, mask=valid, other=float("-inf"), cache_modifier=".cg")
        item_total = tl.load(statistic + sum_offset, mask=valid, other=0, cache_modifier=".cg")
        # Heads beyond the group have no maximum; 0 keeps them from computing inf - inf.
        new_maximum = tl.maximum(maximum, tl.where(head < group, tl.max(item_maximum, 0), 0))
        weight = tl.exp2(item_maximum - new_maximum[None, :])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weight * item_total, 0)
        output = output * decay[:, None] + tl.sum(weight[:, :, None] * partial, 0)
        maximum = new_maximum
    return output / tl.where(head < group, total, 1)[:, None]


@triton.jit(do_not_specialize=["table_stride"])
def _attend_item(
    qkv,
    key_cache,
    value_cache,
    block_tables,
    items,
    slot_mapping,
    cos,
    sin,
    query_norm,
    key_norm,
    norm_eps,
    out,
    partials,
    statistics,
    counters,
    table_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    query_rows: tl.constexpr,
    combined_items: tl.constexpr,
    normalise: tl.constexpr,
    item_fields: tl.constexpr,
    pdl: tl.constexpr,
):
    """Attention of one KV head's query heads to one item; grid (Hkv, items)."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    record = items + item * item_fields
    sequence = tl.load(record)
    start = tl.load(record + 1)
    end = tl.load(record + 2)
    row = tl.load(record + 3)
    first_item = tl.load(record + 4)
    num_items = tl.load(record + 5)
    holds_newest = tl.load(record + 6)
    if sequence < 0:
        return

    num_heads: tl.constexpr = num_kv_heads * group
    dtype: tl.constexpr = key_cache.dtype.element_ty
    head = tl.arange(0, query_rows)[:, None]
    dim = tl.arange(0, padded_dim)[None, :]
    token = qkv + sequence.to(tl.int64) * ((num_heads + 2 * num_kv_heads) * head_dim)
    cos += sequence * (head_dim // 2)
    sin += sequence * (head_dim // 2)
    query = token + (kv_head * group + head) * head_dim
    query = _rotated(query, head < group, cos, sin, query_norm, norm_eps, head_dim, padded_dim, normalise)
    # Scores in powers of two: exp2 is the hardware's exponential.
    query = (query * (1.4426950408889634 * head_dim**-0.5)).to(dtype)

    # The newest token is an extra key of the item that holds it; the loop reads only what earlier steps stored.
    one = tl.arange(0, 1)[:, None]
    has_newest = one < holds_newest
    newest_key = token + (num_heads + kv_head) * head_dim + one
    newest_key = _rotated(newest_key, has_newest, cos, sin, key_norm, norm_eps, head_dim, padded_dim, normalise)
    newest_key = newest_key.to(dtype)
    storing = has_newest & (dim < head_dim)
    newest_value = tl.load(token + (num_heads + num_kv_heads + kv_head) * head_dim + dim, mask=storing, other=0)
    slot = tl.load(slot_mapping + sequence)
    stored = ((slot // block_size) * num_kv_heads + kv_head) * (block_size * head_dim) + (slot % block_size) * head_dim
    tl.store(key_cache + stored + dim, newest_key, mask=storing)
    tl.store(value_cache + stored + dim, newest_value, mask=storing)
    newest_score = tl.sum(query.to(tl.float32) * newest_key.to(tl.float32), 1)
    maximum = tl.where(holds_newest != 0, newest_score, float("-inf"))
    total = tl.zeros((query_rows,), tl.float32) + holds_newest
    output = tl.zeros((query_rows, padded_dim), tl.float32) + newest_value.to(tl.float32)

    keys = key_cache + kv_head * (block_size * head_dim)
    values = value_cache + kv_head * (block_size * head_dim)
    table = block_tables + row.to(tl.int64) * table_stride
    cached_end = end - holds_newest
    # Positions past the end read the last token again, so that loads need no mask; their scores are dropped.
    readable = tl.maximum(tl.minimum(start + tl.arange(0, tile), cached_end - 1), 0)
    block = tl.load(table + readable // block_size)
    for first in range(start, cached_end, tile):
        position = first + tl.arange(0, tile)
        readable = tl.minimum(position, cached_end - 1)
        offset = block.to(tl.int64) * (num_kv_heads * block_size * head_dim) + (readable % block_size) * head_dim
        # One tile ahead: keys whose address waits for a load of the same turn would not be read in advance.
        block = tl.load(table + tl.minimum(position + tile, cached_end - 1) // block_size)
        if padded_dim == head_dim:
            key = tl.load(keys + offset[:, None] + dim)
            value = tl.load(values + offset[:, None] + dim)
        else:
            key = tl.load(keys + offset[:, None] + dim, mask=dim < head_dim, other=0)
            value = tl.load(values + offset[:, None] + dim, mask=dim < head_dim, other=0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        score = tl.where((position < cached_end)[None, :], score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        weight = tl.exp2(score - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weight, 1)
        output = tl.dot(weight.to(dtype), value, output * decay[:, None], input_precision="ieee")
        maximum = new_maximum

    written = (head < group) & (dim < head_dim)
    out += (sequence.to(tl.int64) * num_heads + kv_head * group) * head_dim
    if num_items == 1:
        tl.store(out + head * head_dim + dim, (output / total[:, None]).to(dtype), mask=written)
    else:
        partials += (first_item.to(tl.int64) * num_heads + kv_head * group) * head_dim
        statistics += first_item * (2 * num_heads) + kv_head * group
        split = item - first_item
        head_row = tl.arange(0, query_rows)
        statistic = statistics + split * (2 * num_heads) + head_row
        tl.store(partials + split * (num_heads * head_dim) + head * head_dim + dim, output, mask=written)
        tl.store(statistic, maximum, mask=head_row < group)
        tl.store(statistic + num_heads, total, mask=head_row < group)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        counter = counters + sequence * num_kv_heads + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_items - 1:
            combined = _combined(
                partials,
                statistics,
                num_items,
                num_heads * head_dim,
                2 * num_heads,
                num_heads,
                group,
                padded_group,
                head_dim,
                padded_dim,
                combined_items,
            )
            out_head = tl.arange(0, padded_group)[:, None]
            tl.store(
                out + out_head * head_dim + dim,
                combined.to(dtype),
                mask=(out_head < group) & (dim < head_dim),
            )
            tl.store(counter, 0)
