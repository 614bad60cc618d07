"""The newest token's heads in decode attention: loaded as projected, normalised, rotated and stored, on the device.

Triton functions that become part of the kernel in engine/kernels/decode_attention.py, which calls them.  Tiles are
[padded group, padded head_dim]: the query heads of one KV head, both sizes padded to powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_with_partner(vectors, present, head_dim: tl.constexpr):
    """Vectors [rows, padded head_dim] at pointers [rows, 1], in fp32, and each element's partner in the rotation.

    The partner is half a head away; loading it too makes the rotation a matter of one tile.
    """
    half: tl.constexpr = head_dim // 2
    dim = tl.arange(0, triton.next_power_of_2(head_dim))[None, :]
    wanted = present & (dim < head_dim)
    elements = tl.load(vectors + dim, mask=wanted, other=0).to(tl.float32)
    partners = tl.load(vectors + tl.where(dim < half, dim + half, dim - half), mask=wanted, other=0).to(tl.float32)
    return elements, partners


@triton.jit
def _rotate(heads, partners, weight, partner_weight, eps, cosine, signed_sine, head_dim, normalise: tl.constexpr):
    """Normalise heads [rows, padded head_dim] if asked, and rotate them (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""
    if normalise:
        scale = tl.rsqrt(tl.sum(heads * heads, 1) / head_dim + eps)[:, None]
        heads *= scale * weight
        partners *= scale * partner_weight
    return heads * cosine + partners * signed_sine


@triton.jit
def load_norm_weights(query_norm, key_norm, rows: tl.constexpr, head_dim: tl.constexpr, normalise: tl.constexpr):
    """The weights of both norms and their partners, each [rows, padded head_dim]; numbers if there are none."""
    weights, weight_partners, key_weights, key_weight_partners = 0, 0, 0, 0
    if normalise:
        same = tl.arange(0, rows)[:, None] * 0
        weights, weight_partners = _load_with_partner(query_norm + same, same == 0, head_dim)
        key_weights, key_weight_partners = _load_with_partner(key_norm + same, same == 0, head_dim)
    return weights, weight_partners, key_weights, key_weight_partners


@triton.jit
def newest_heads(
    token,
    cos,
    sin,
    kv_head,
    holds_newest,
    norm_weights,
    norm_eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    normalise: tl.constexpr,
):
    """The query heads, and the key and value if `holds_newest`, of one token, each [padded group, padded head_dim].

    Queries are scaled for scores in powers of two.  What all heads share is loaded once for each head: that costs
    nothing, and spares the exchanges between warps that another layout would need.
    """
    group: tl.constexpr = num_heads // num_kv_heads
    half: tl.constexpr = head_dim // 2
    head = tl.arange(0, triton.next_power_of_2(group))[:, None]
    dim = tl.arange(0, triton.next_power_of_2(head_dim))[None, :]
    same = head * 0
    inside = (same == 0) & (dim < head_dim)
    frequency = same + tl.where(dim < half, dim, dim - half)
    cosine = tl.load(cos + frequency, mask=inside, other=0)
    sine = tl.load(sin + frequency, mask=inside, other=0)
    newest = token + (num_heads + kv_head) * head_dim + same
    has_newest = same < holds_newest
    value = tl.load(newest + num_kv_heads * head_dim + dim, mask=has_newest & inside, other=0)
    key, key_partner = _load_with_partner(newest, has_newest, head_dim)
    query_head = token + (kv_head * group + head) * head_dim
    partner_dim = tl.where(dim < half, dim + half, dim - half)
    query_partner = tl.load(query_head + partner_dim, mask=(head < group) & inside, other=0).to(tl.float32)
    # Without it the compiler would put some of these loads off until the query has arrived.
    tl.debug_barrier()
    query = tl.load(query_head + dim, mask=(head < group) & inside, other=0).to(tl.float32)

    sine = tl.where(dim < half, -sine, sine)
    query = _rotate(query, query_partner, norm_weights[0], norm_weights[1], norm_eps, cosine, sine, head_dim, normalise)
    key = _rotate(key, key_partner, norm_weights[2], norm_weights[3], norm_eps, cosine, sine, head_dim, normalise)
    return (query * (_LOG2_E * head_dim**-0.5)).to(value.dtype), key.to(value.dtype), value


@triton.jit
def store_newest(cache, vector, slot, kv_head, holds_newest, num_kv_heads, block_size, head_dim: tl.constexpr):
    """Store the first row of `vector` at `slot` of one KV head."""
    row = tl.arange(0, vector.shape[0])[:, None]
    dim = tl.arange(0, vector.shape[1])[None, :]
    line = ((slot // block_size) * num_kv_heads + kv_head) * block_size + slot % block_size
    tl.store(cache + line * head_dim + row * 0 + dim, vector, mask=(row < holds_newest) & (dim < head_dim))
