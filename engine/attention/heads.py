"""From a layer's projection to rotated heads, in plain torch: the first half of a backend's `attend`.

Used by `engine.attention.torch_paged`; Triton backends fuse the same steps into their kernels.
"""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm

from engine.attention.backend import HeadNorms
from engine.layers.rotary import Rotation


def split_heads(
    qkv: torch.Tensor, num_kv_heads: int, head_dim: int, rotation: Rotation, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [T, (H + 2 num_kv_heads) x head_dim] -> query [T, H, head_dim], key and value [T, num_kv_heads, head_dim].

    Query and key are normed, if the model does so, and rotated.
    """
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    rotated, value = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if norms is not None:
        query, key = rotated.split((num_heads, num_kv_heads), dim=1)
        query = rms_norm(query, (head_dim,), norms.query_weight, norms.eps)
        key = rms_norm(key, (head_dim,), norms.key_weight, norms.eps)
        rotated = torch.cat((query, key), dim=1)
    query, key = rotation.rotate(rotated).split((num_heads, num_kv_heads), dim=1)
    return query, key, value
