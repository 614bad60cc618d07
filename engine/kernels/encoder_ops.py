"""`EncoderOps`: the fused steps an encoder is made of, besides attention and the products of `Ops`.

`engine.kernels.torch_encoder_ops` is the reference and serves every device and every kind of weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kernels.ops import Ops, Weight
from engine.layers.packed_weight import CodedRows, PackedWeight


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A layer norm: (x - mean) / sqrt(variance + eps) · weight + bias, over the last axis, with weights [H].

    Ba et al. 2016, https://arxiv.org/abs/1607.06450; the variance is that of the H values themselves.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class EmbeddingTables:
    """Rows that are summed for a token: by its id [V, H], its position [P, H] and the text that it is in [2, H]."""

    words: torch.Tensor
    positions: torch.Tensor
    types: torch.Tensor


class EncoderOps(Ops[Weight], Protocol[Weight]):
    """T tokens; tensors in the model's dtype and contiguous; no argument is written to, but for those of `Ops.add`."""

    def embed_norm(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        type_ids: torch.Tensor,
        tables: EmbeddingTables,
        norm: NormWeights,
    ) -> torch.Tensor:
        """Integers [T] each -> norm of the sum of their rows [T, H]."""
        ...

    def linear_gelu(self, hidden: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """hidden [T, K], weight [N, K] -> gelu(hidden · weightᵀ + bias) [T, N].

        gelu(x) = x · (1 + erf(x / sqrt(2))) / 2 (Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415).
        """
        ...

    def linear_add_norm(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: NormWeights,
    ) -> torch.Tensor:
        """Project, add, normalise: hidden [T, K], weight [N, K], residual [T, N] -> [T, N]."""
        ...


class PackedEncoderOps(EncoderOps[PackedWeight], Protocol):
    """Those of packed weights, which also say how these are packed."""

    def pack(self, parts: Sequence[CodedRows | torch.Tensor]) -> PackedWeight:
        """The weight whose outputs are those of `parts`, floats [N, K] of one input width, one after the other."""
        ...
