"""Decode attention over the paged KV cache: one token per sequence, on NVIDIA GPUs, in Triton.

`plan_decode` runs once per step and cuts the contexts of all sequences into items of about equal length, on the
device, so that a captured graph serves any context lengths.  `decode_attention` runs once per layer: it normalises
and rotates the newest token's query and key, stores that key and value in the cache, and attends.  Each program
handles one item of one KV head; the last program of a sequence to finish combines the items (split KV, as in
"Flash-Decoding", https://pytorch.org/blog/flash-decoding/), so there is no second kernel.

Knows nothing of layers, scheduling or who owns the cache.  Called by the Triton attention backend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.decode_plan import (
    ITEM_FIELDS,
    DecodePlan,
    DecodeTuning,
    allocate_workspace,
    default_tuning,
    plan_decode,
)
from engine.kernels.launch import pdl_options, supports_pdl

__all__ = ["DecodePlan", "DecodeTuning", "allocate_workspace", "decode_attention", "default_tuning", "plan_decode"]

_QUERY_ROWS = 16  # the smallest tile a tensor core takes; holds the query heads of one KV head
_COMBINE_ELEMENTS = 8192  # partial results the combination holds in registers at a time


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
    *,
    reads_early: bool = False,
) -> None:
    """Store the newest keys and values of the planned sequences, then attend; one kernel.

    qkv [T, (H + 2 Hkv) D], the projection's output, the planned decodes first; key_cache and value_cache
    [num_blocks, Hkv, block_size, D] of one layer; block_tables int32 [lines, max_blocks]; slot_mapping int64 [T];
    cos and sin float32 [T, D / 2]; query_norm and key_norm [D], RMS norm weights of each head, or None;
    out [T, H D].  Lines of `out` whose sequence is padding are left as they are.

    `reads_early` lets the kernel read the plan, the block tables and what earlier steps cached while the kernel
    before it still runs.  It needs an ordinary launch (not a programmatic dependent one) after `plan_decode`, and
    that nothing since that launch wrote keys or values to this layer's cache.
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
        holds_first_tile=tuning.holds_first_tile,
        reads_early=reads_early,
        item_fields=ITEM_FIELDS,
        pdl=supports_pdl(device),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **pdl_options(device),
    )


@triton.jit
def _load_with_partner(vectors, present, head_dim: tl.constexpr, padded_dim: tl.constexpr):
    """Vectors [rows, padded_dim] at pointers [rows, 1], in fp32, and each element's partner in the rotation.

    The partner is half a head away; loading it too makes the rotation a matter of one tile.
    """
    half: tl.constexpr = head_dim // 2
    dim = tl.arange(0, padded_dim)[None, :]
    wanted = present & (dim < head_dim)
    elements = tl.load(vectors + dim, mask=wanted, other=0).to(tl.float32)
    partners = tl.load(vectors + tl.where(dim < half, dim + half, dim - half), mask=wanted, other=0).to(tl.float32)
    return elements, partners


@triton.jit
def _rotate(heads, partners, weight, partner_weight, eps, cosine, signed_sine, head_dim, normalise: tl.constexpr):
    """Normalise heads [rows, padded_dim] if asked, and rotate them (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""
    if normalise:
        scale = tl.rsqrt(tl.sum(heads * heads, 1) / head_dim + eps)[:, None]
        heads *= scale * weight
        partners *= scale * partner_weight
    return heads * cosine + partners * signed_sine


@triton.jit
def _repeat_rows(rows, num_rows: tl.constexpr):
    """[n, width] repeated to [num_rows, width]."""
    repeated = tl.broadcast_to(rows[None, :, :], (num_rows // rows.shape[0], rows.shape[0], rows.shape[1]))
    return tl.reshape(repeated, (num_rows, rows.shape[1]))


@triton.jit
def _combined(
    partials,
    statistics,
    num_items,
    num_heads: tl.constexpr,
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
            partials + item[:, None, None] * (num_heads * head_dim) + element,
            mask=present[:, None, None] & inside,
            other=0,
            cache_modifier=".cg",
        )
        statistic = statistics + item[:, None] * (2 * num_heads) + head[None, :]
        valid = present[:, None] & (head < group)[None, :]
        item_maximum = tl.load(statistic, mask=valid, other=float("-inf"), cache_modifier=".cg")
        item_total = tl.load(statistic + num_heads, mask=valid, other=0, cache_modifier=".cg")
        # Heads beyond the group have no maximum; 0 keeps them from computing inf - inf.
        new_maximum = tl.maximum(maximum, tl.where(head < group, tl.max(item_maximum, 0), 0))
        weight = tl.exp2(item_maximum - new_maximum[None, :])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weight * item_total, 0)
        output = output * decay[:, None] + tl.sum(weight[:, :, None] * partial, 0)
        maximum = new_maximum
    return output / tl.where(head < group, total, 1)[:, None]


@triton.jit
def _attend_tile(query, key, value, is_key, maximum, total, output):
    """One turn of the online softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867).

    `total` [rows, tile] is summed over its tile only at the end, to spare an exchange between warps in each turn.
    """
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    score = tl.where(is_key[None, :], score, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(score, 1))
    weight = tl.exp2(score - new_maximum[:, None])
    decay = tl.exp2(maximum - new_maximum)[:, None]
    output = tl.dot(weight.to(value.dtype), value, output * decay, input_precision="ieee")
    return new_maximum, total * decay + weight, output


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
    holds_first_tile: tl.constexpr,
    reads_early: tl.constexpr,
    item_fields: tl.constexpr,
    pdl: tl.constexpr,
):
    """Attention of one KV head's query heads to one item; grid (Hkv, items)."""
    num_heads: tl.constexpr = num_kv_heads * group
    block_stride: tl.constexpr = num_kv_heads * block_size * head_dim
    dtype: tl.constexpr = key_cache.dtype.element_ty
    if pdl:
        gdc_launch_dependents()
        if not reads_early:
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

    # An unused item reads nothing: its range is empty, and what else an old plan left there is in bounds.
    cached_end = tl.where(sequence >= 0, end - holds_newest, start)
    # Positions past the end read the last token again, so that the loop's loads need no mask; their scores are dropped.
    last = tl.maximum(cached_end - 1, 0)
    in_tile = tl.arange(0, tile)
    dim = tl.arange(0, padded_dim)[None, :]
    in_head = dim < head_dim
    keys = key_cache + kv_head * (block_size * head_dim)
    values = value_cache + kv_head * (block_size * head_dim)
    table = block_tables + tl.maximum(row, 0).to(tl.int64) * table_stride
    first_looped = start
    block = tl.load(table + tl.minimum(tl.maximum(start, 0) + in_tile, last) // block_size)
    if holds_first_tile:
        is_held = start + in_tile < cached_end
        held_mask = is_held[:, None] & in_head
        held_offset = block.to(tl.int64) * block_stride + ((start + in_tile) % block_size) * head_dim
        first_looped += tile
        block = tl.load(table + tl.minimum(first_looped + in_tile, last) // block_size)
        held_key = tl.load(keys + held_offset[:, None] + dim, mask=held_mask, other=0)
        held_value = tl.load(values + held_offset[:, None] + dim, mask=held_mask, other=0)

    # Vectors that all heads share are loaded once for each head: that costs nothing, and spares the exchanges
    # between warps that another layout would need.
    head = tl.arange(0, padded_group)[:, None]
    everywhere = tl.full((padded_group, 1), 1, tl.int1)
    query_weight, query_weight_partner, key_weight, key_weight_partner = 0, 0, 0, 0
    if normalise:
        query_weights = tl.broadcast_to(query_norm, (padded_group, 1))
        key_weights = tl.broadcast_to(key_norm, (padded_group, 1))
        query_weight, query_weight_partner = _load_with_partner(query_weights, everywhere, head_dim, padded_dim)
        key_weight, key_weight_partner = _load_with_partner(key_weights, everywhere, head_dim, padded_dim)
    if pdl and reads_early:
        gdc_wait()
    if sequence < 0:
        return

    # All that this step's earlier kernels computed is requested at once.
    half: tl.constexpr = head_dim // 2
    frequency = tl.where(dim < half, dim, dim - half) + sequence * half
    token = qkv + sequence.to(tl.int64) * ((num_heads + 2 * num_kv_heads) * head_dim)
    newest = tl.broadcast_to(token + (num_heads + kv_head) * head_dim, (padded_group, 1))
    slot = tl.load(slot_mapping + sequence)
    cosine = tl.load(tl.broadcast_to(cos + frequency, (padded_group, padded_dim)), mask=everywhere & in_head, other=0)
    sine = tl.load(tl.broadcast_to(sin + frequency, (padded_group, padded_dim)), mask=everywhere & in_head, other=0)
    has_newest = (head * 0 < holds_newest) & in_head
    newest_value = tl.load(newest + num_kv_heads * head_dim + dim, mask=has_newest, other=0)
    newest_key, newest_key_partner = _load_with_partner(newest, has_newest, head_dim, padded_dim)
    # Without it the compiler would put these loads off until the query has arrived.
    tl.debug_barrier()
    query, query_partner = _load_with_partner(
        token + (kv_head * group + head) * head_dim, head < group, head_dim, padded_dim
    )
    sine = tl.where(dim < half, -sine, sine)
    query = _rotate(
        query, query_partner, query_weight, query_weight_partner, norm_eps, cosine, sine, head_dim, normalise
    )
    # Scores in powers of two: exp2 is the hardware's exponential.
    query = (query * (1.4426950408889634 * head_dim**-0.5)).to(dtype)

    # The newest token is an extra key of the item that holds it; everything else was stored by earlier steps.
    newest_key = _rotate(
        newest_key, newest_key_partner, key_weight, key_weight_partner, norm_eps, cosine, sine, head_dim, normalise
    ).to(dtype)
    stored = (slot // block_size) * block_stride + (slot % block_size) * head_dim + dim
    tl.store(keys + stored + head * 0, newest_key, mask=has_newest & (head == 0))
    tl.store(values + stored + head * 0, newest_value, mask=has_newest & (head == 0))
    newest_score = tl.sum(query.to(tl.float32) * newest_key.to(tl.float32), 1)
    newest_score = tl.where(holds_newest != 0, newest_score, float("-inf"))

    # The heads are repeated to fill the rows of a tensor-core tile.
    query = _repeat_rows(query, query_rows)
    maximum = tl.ravel(_repeat_rows(newest_score[:, None], query_rows))
    total = tl.zeros((query_rows, tile), tl.float32) + tl.where(in_tile == 0, holds_newest, 0)[None, :]
    output = _repeat_rows(newest_value, query_rows).to(tl.float32)

    for first in range(first_looped, cached_end, tile):
        position = first + in_tile
        readable = tl.minimum(position, last)
        offset = (block.to(tl.int64) * block_stride + (readable % block_size) * head_dim)[:, None] + dim
        # One tile ahead: keys whose address waits for a load of the same turn would not be read in advance.
        block = tl.load(table + tl.minimum(position + tile, last) // block_size)
        if padded_dim == head_dim:
            key = tl.load(keys + offset)
            value = tl.load(values + offset)
        else:
            key = tl.load(keys + offset, mask=in_head, other=0)
            value = tl.load(values + offset, mask=in_head, other=0)
        maximum, total, output = _attend_tile(query, key, value, position < cached_end, maximum, total, output)
    if holds_first_tile:
        maximum, total, output = _attend_tile(query, held_key, held_value, is_held, maximum, total, output)
    total = tl.sum(total, 1)

    flat_head = tl.arange(0, query_rows)
    row_head = flat_head[:, None]
    out += (sequence.to(tl.int64) * num_heads + kv_head * group) * head_dim
    written = (row_head < group) & in_head
    if num_items == 1:
        tl.store(out + row_head * head_dim + dim, (output / total[:, None]).to(dtype), mask=written)
    else:
        partials += (first_item.to(tl.int64) * num_heads + kv_head * group) * head_dim
        statistics += first_item * (2 * num_heads) + kv_head * group
        split = item - first_item
        statistic = statistics + split * (2 * num_heads) + flat_head
        tl.store(partials + split * (num_heads * head_dim) + row_head * head_dim + dim, output, mask=written)
        tl.store(statistic, maximum, mask=flat_head < group)
        tl.store(statistic + num_heads, total, mask=flat_head < group)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        counter = counters + sequence * num_kv_heads + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_items - 1:
            combined = _combined(
                partials,
                statistics,
                num_items,
                num_heads,
                group,
                padded_group,
                head_dim,
                padded_dim,
                combined_items,
            )
            tl.store(out + head * head_dim + dim, combined.to(dtype), mask=(head < group) & in_head)
            tl.store(counter, 0)
