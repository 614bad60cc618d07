"""`EncoderOps` in plain torch: what encoders run without compiled kernels, and what all kernels are compared with."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, gelu, layer_norm

from engine.kernels.encoder_ops import EmbeddingTables, NormWeights
from engine.kernels.torch_ops import TorchOps
from engine.layers.packed_weight import PackedWeight


class TorchEncoderOps(TorchOps):
    """See `engine.kernels.encoder_ops.EncoderOps`; takes both kinds of weight."""

    def embed_norm(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        type_ids: torch.Tensor,
        tables: EmbeddingTables,
        norm: NormWeights,
    ) -> torch.Tensor:
        total = embedding(token_ids, tables.words)
        total += embedding(type_ids, tables.types)
        total += embedding(positions, tables.positions)
        return _norm(total, norm)

    def linear_gelu(
        self, hidden: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return gelu(self.linear(hidden, weight, bias))

    def linear_add_norm(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | PackedWeight,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: NormWeights,
    ) -> torch.Tensor:
        return _norm(self.linear(hidden, weight, bias).add_(residual), norm)


def _norm(values: torch.Tensor, norm: NormWeights) -> torch.Tensor:
    return layer_norm(values, norm.weight.shape, norm.weight, norm.bias, norm.eps)
