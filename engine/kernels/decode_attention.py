"""Decode attention over the paged KV cache: one token per sequence, on NVIDIA GPUs, in Triton.

`plan_decode` runs once per step and cuts the contexts of all sequences into items, on the device, so that a captured
graph serves any context lengths.  `decode_attention` runs once per layer: it normalises
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

from engine.kernels.decode_heads import load_norm_weights, newest_heads, store_newest
from engine.kernels.decode_plan import (
    COMBINED_ELEMENTS,
    ITEM_FIELDS,
    DecodePlan,
    DecodeTuning,
    allocate_workspace,
    default_tuning,
    plan_decode,
)
from engine.kernels.launch import pdl_options, supports_pdl

__all__ = ["DecodePlan", "DecodeTuning", "allocate_workspace", "decode_attention", "default_tuning", "plan_decode"]

MAX_GROUP = 16
_QUERY_ROWS = tl.constexpr(16)  # the smallest tile a tensor core takes; holds the query heads of one KV head
_COMBINED_ELEMENTS = tl.constexpr(COMBINED_ELEMENTS)


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
    assert group <= MAX_GROUP
    assert qkv.stride(0) == qkv.shape[1] and out.stride(0) == num_kv_heads * group * head_dim
    assert key_cache.is_contiguous() and value_cache.is_contiguous() and block_tables.stride(1) == 1
    _attend_item[(num_kv_heads, plan.max_items)](
        qkv, key_cache, value_cache, block_tables, workspace.items, slot_mapping, cos, sin,
        qkv if query_norm is None else query_norm, qkv if key_norm is None else key_norm, norm_eps,
        out, workspace.partials, workspace.statistics, workspace.counters, block_tables.stride(0),
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size,
        tile=tuning.tile, holds_first_tile=tuning.holds_first_tile, normalise=query_norm is not None,
        reads_early=reads_early, item_fields=ITEM_FIELDS, pdl=supports_pdl(device),
        num_warps=tuning.num_warps, num_stages=tuning.num_stages, maxnreg=tuning.num_registers, **pdl_options(device),
    )  # fmt: skip


@triton.jit
def _repeat_rows(rows, num_rows: tl.constexpr):
    """[n, width] repeated to [num_rows, width]."""
    repeated = tl.broadcast_to(rows[None, :, :], (num_rows // rows.shape[0], rows.shape[0], rows.shape[1]))
    return tl.reshape(repeated, (num_rows, rows.shape[1]))


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


@triton.jit
def _combined(
    partials, statistics, num_items, num_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr
):  # fmt: skip
    """Normalised output [padded_group, padded_dim] of all items of one sequence and KV head.

    Reads past the first-level cache, where another program's results do not show.
    """
    padded_group: tl.constexpr = triton.next_power_of_2(group)
    padded_dim: tl.constexpr = triton.next_power_of_2(head_dim)
    at_once: tl.constexpr = _COMBINED_ELEMENTS // (padded_group * padded_dim)
    head = tl.arange(0, padded_group)
    dim = tl.arange(0, padded_dim)
    element = head[None, :, None] * head_dim + dim[None, None, :]
    inside = (head < group)[None, :, None] & (dim < head_dim)[None, None, :]
    maximum = tl.full((padded_group,), float("-inf"), tl.float32)
    total = tl.zeros((padded_group,), tl.float32)
    output = tl.zeros((padded_group, padded_dim), tl.float32)
    for first in range(0, num_items, at_once):
        item = first + tl.arange(0, at_once)
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
def _finish_item(
    maximum, total, output, item, first_item, num_items, out, partials, statistics, counter, kv_head,
    num_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr,
):  # fmt: skip
    """Write the output of a sequence's only item; leave that of one of several, and combine them if it is the last.

    `out` points to the sequence's line of the output; the workspace's pointers to its beginning.
    """
    head = tl.arange(0, output.shape[0])
    dim = tl.arange(0, output.shape[1])[None, :]
    element = head[:, None] * head_dim + dim
    written = (head[:, None] < group) & (dim < head_dim)
    first_head = kv_head * group
    out += first_head * head_dim
    if num_items == 1:
        tl.store(out + element, (output / total[:, None]).to(out.dtype.element_ty), mask=written)
    else:
        partial = partials + (item.to(tl.int64) * num_heads + first_head) * head_dim
        statistic = statistics + item * (2 * num_heads) + first_head
        tl.store(partial + element, output, mask=written)
        tl.store(statistic + head, maximum, mask=head < group)
        tl.store(statistic + num_heads + head, total, mask=head < group)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_items - 1:
            partials += (first_item.to(tl.int64) * num_heads + first_head) * head_dim
            statistics += first_item * (2 * num_heads) + first_head
            combined = _combined(partials, statistics, num_items, num_heads, group, head_dim)
            row = tl.arange(0, combined.shape[0])[:, None]
            inside = (row < group) & (dim < head_dim)
            tl.store(out + row * head_dim + dim, combined.to(out.dtype.element_ty), mask=inside)
            tl.store(counter, 0)


@triton.jit
def _blocks(table, position, cached_end, block_size: tl.constexpr):
    """Blocks of the tokens at `position`; past the end, that of the last, so that loads need no mask."""
    return tl.load(table + tl.minimum(position, tl.maximum(cached_end - 1, 0)) // block_size)


@triton.jit
def _elements(block, line, num_kv_heads: tl.constexpr, block_size: tl.constexpr, head_dim: tl.constexpr):
    """Offsets [tile, padded head_dim] of one KV head's keys or values at some lines of some blocks."""
    dim = tl.arange(0, triton.next_power_of_2(head_dim))[None, :]
    return (block.to(tl.int64) * (num_kv_heads * block_size * head_dim) + line * head_dim)[:, None] + dim


@triton.jit
def _attend_cached(
    query, maximum, total, output, keys, values, table, block, start, cached_end,
    num_kv_heads: tl.constexpr, block_size: tl.constexpr, head_dim: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The online softmax over cached tokens; `block` [tile] are the blocks of the first of them."""
    in_tile = tl.arange(0, tile)
    dim = tl.arange(0, triton.next_power_of_2(head_dim))[None, :]
    last = tl.maximum(cached_end - 1, 0)
    for first in range(start, cached_end, tile):
        position = first + in_tile
        # Positions past the end read the last token again; their scores are dropped.
        line = tl.minimum(position, last) % block_size
        element = _elements(block, line, num_kv_heads, block_size, head_dim)
        # One tile ahead: keys whose address waits for a load of the same turn would not be read in advance.
        block = _blocks(table, position + tile, cached_end, block_size)
        if dim.shape[1] == head_dim:
            key = tl.load(keys + element)
            value = tl.load(values + element)
        else:
            key = tl.load(keys + element, mask=dim < head_dim, other=0)
            value = tl.load(values + element, mask=dim < head_dim, other=0)
        maximum, total, output = _attend_tile(query, key, value, position < cached_end, maximum, total, output)
    return maximum, total, output


@triton.jit(do_not_specialize=["table_stride"])
def _attend_item(
    qkv, key_cache, value_cache, block_tables, items, slot_mapping, cos, sin, query_norm, key_norm, norm_eps,
    out, partials, statistics, counters, table_stride,
    num_kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, block_size: tl.constexpr,
    tile: tl.constexpr, holds_first_tile: tl.constexpr, normalise: tl.constexpr, reads_early: tl.constexpr,
    item_fields: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Attention of one KV head's query heads to one item; grid (Hkv, items)."""
    num_heads: tl.constexpr = num_kv_heads * group
    if pdl:
        gdc_launch_dependents()
        if not reads_early:
            gdc_wait()
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    record = items + item * item_fields
    sequence, start, end, row = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    first_item, num_items, holds_newest = tl.load(record + 4), tl.load(record + 5), tl.load(record + 6)

    # An unused item reads no keys: its range is empty, and what else an old plan left there is in bounds.
    cached_end = tl.where(sequence >= 0, end - holds_newest, start)
    keys = key_cache + kv_head * (block_size * head_dim)
    values = value_cache + kv_head * (block_size * head_dim)
    table = block_tables + tl.maximum(row, 0).to(tl.int64) * table_stride
    position = tl.maximum(start, 0) + tl.arange(0, tile)
    block = _blocks(table, position, cached_end, block_size)
    if holds_first_tile:
        is_held = position < cached_end
        element = _elements(block, position % block_size, num_kv_heads, block_size, head_dim)
        start += tile
        block = _blocks(table, position + tile, cached_end, block_size)
        is_element = is_held[:, None] & (tl.arange(0, element.shape[1]) < head_dim)[None, :]
        held_key = tl.load(keys + element, mask=is_element, other=0)
        held_value = tl.load(values + element, mask=is_element, other=0)

    norm_weights = load_norm_weights(query_norm, key_norm, triton.next_power_of_2(group), head_dim, normalise)
    if pdl and reads_early:
        gdc_wait()
    if sequence < 0:
        return
    sequence = sequence.to(tl.int64)
    slot = tl.load(slot_mapping + sequence)
    query, newest_key, newest_value = newest_heads(
        qkv + sequence * ((num_heads + 2 * num_kv_heads) * head_dim),
        cos + sequence * (head_dim // 2), sin + sequence * (head_dim // 2),
        kv_head, holds_newest, norm_weights, norm_eps, num_heads, num_kv_heads, head_dim, normalise,
    )  # fmt: skip
    # The newest token is an extra key of the item that holds it; all others were stored by earlier steps.
    store_newest(key_cache, newest_key, slot, kv_head, holds_newest, num_kv_heads, block_size, head_dim)
    store_newest(value_cache, newest_value, slot, kv_head, holds_newest, num_kv_heads, block_size, head_dim)
    newest_score = tl.sum(query.to(tl.float32) * newest_key.to(tl.float32), 1)
    newest_score = tl.where(holds_newest != 0, newest_score, float("-inf"))

    # Heads are repeated to fill the rows of a tensor-core tile.
    query = _repeat_rows(query, _QUERY_ROWS)
    maximum = tl.ravel(_repeat_rows(newest_score[:, None], _QUERY_ROWS))
    total = tl.zeros((_QUERY_ROWS, tile), tl.float32) + tl.where(tl.arange(0, tile) == 0, holds_newest, 0)[None, :]
    output = _repeat_rows(newest_value, _QUERY_ROWS).to(tl.float32)
    maximum, total, output = _attend_cached(
        query, maximum, total, output, keys, values, table, block, start, cached_end,
        num_kv_heads, block_size, head_dim, tile,
    )  # fmt: skip
    if holds_first_tile:
        maximum, total, output = _attend_tile(query, held_key, held_value, is_held, maximum, total, output)
    _finish_item(
        maximum, tl.sum(total, 1), output, item, first_item, num_items, out + sequence * (num_heads * head_dim),
        partials, statistics, counters + sequence * num_kv_heads + kv_head, kv_head, num_heads, group, head_dim,
    )  # fmt: skip
