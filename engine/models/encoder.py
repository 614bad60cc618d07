"""The encoder that BERT and RoBERTa share: post-norm blocks of attention and an MLP over whole texts.

Tokens of all texts lie end to end in one flat batch; which tokens see each other is the attention's business alone.
Inference only.  What becomes of the hidden states, vectors or scores, is `engine.runner.encoder_runner`'s business,
but for the classification head, which is a weight of the model.  Subclassed by the model files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch

from engine.attention.ragged import RaggedAttention
from engine.kernels.encoder_ops import EmbeddingTables, EncoderOps, PackedEncoderOps
from engine.kernels.torch_encoder_ops import TorchEncoderOps
from engine.layers.layer_norm import LayerNorm
from engine.layers.linear import Linear
from engine.layers.packed_linear import PackedLinear
from engine.layers.placement import ParameterMemory, Placement
from engine.layers.select import new_linear
from engine.layers.weight_slot import CopySlot, WeightSlot, slots_under
from engine.models.encoder_config import EncoderConfig
from engine.models.loadable import LoadableModel

AnyEncoderOps = EncoderOps[torch.Tensor] | PackedEncoderOps


class Embeddings(torch.nn.Module):
    """norm(word + position + type): what a token is, where it stands and in which text of a pair."""

    def __init__(self, config: EncoderConfig, placement: Placement, ops: AnyEncoderOps) -> None:
        super().__init__()
        self._ops = ops
        self._first_position = config.first_position
        self.words = placement.parameter(config.vocab_size, config.hidden_size)
        self.positions = placement.parameter(config.num_position_rows, config.hidden_size)
        self.types = placement.parameter(config.num_types, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps, placement)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, type_ids: torch.Tensor) -> torch.Tensor:
        tables = EmbeddingTables(self.words, self.positions[self._first_position :], self.types)
        return self._ops.embed_norm(token_ids, positions, type_ids, tables, self.norm.weights)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield "word_embeddings.weight", CopySlot(self.words)
        yield "position_embeddings.weight", CopySlot(self.positions)
        yield "token_type_embeddings.weight", CopySlot(self.types)
        yield from slots_under("LayerNorm", self.norm)


class EncoderLayer(torch.nn.Module):
    """x = norm(x + attention(x)); x = norm(x + mlp(x)) (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762)."""

    def __init__(self, config: EncoderConfig, placement: Placement, ops: AnyEncoderOps) -> None:
        super().__init__()
        size = config.hidden_size
        # Typed for one kind of weight, as the layers' weights are all of the kind that these compute with.
        self._ops: EncoderOps[object] = ops  # type: ignore[assignment]
        self.qkv = new_linear(size, {"query": size, "key": size, "value": size}, placement, bias=True)
        self.attention_output = new_linear(size, {"": size}, placement, bias=True)
        self.attention_norm = LayerNorm(size, config.layer_norm_eps, placement)
        self.up = new_linear(size, {"": config.intermediate_size}, placement, bias=True)
        self.down = new_linear(config.intermediate_size, {"": size}, placement, bias=True)
        self.output_norm = LayerNorm(size, config.layer_norm_eps, placement)

    def forward(self, hidden: torch.Tensor, attention: RaggedAttention) -> torch.Tensor:
        attended = attention.attend(self.qkv(hidden))
        hidden = self._add_norm(attended, self.attention_output, hidden, self.attention_norm)
        inner = self._ops.linear_gelu(hidden, self.up.weight, self.up.bias)
        return self._add_norm(inner, self.down, hidden, self.output_norm)

    def _add_norm(
        self, inputs: torch.Tensor, product: Linear | PackedLinear, residual: torch.Tensor, norm: LayerNorm
    ) -> torch.Tensor:
        return self._ops.linear_add_norm(inputs, product.weight, product.bias, residual, norm.weights)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield from slots_under("attention.self", self.qkv)
        yield from slots_under("attention.output.dense", self.attention_output)
        yield from slots_under("attention.output.LayerNorm", self.attention_norm)
        yield from slots_under("intermediate.dense", self.up)
        yield from slots_under("output.dense", self.down)
        yield from slots_under("output.LayerNorm", self.output_norm)


class ClassificationHead(torch.nn.Module):
    """out(tanh(dense(x))) of the first token's hidden state; plain torch, for there is one row per text."""

    def __init__(self, config: EncoderConfig, placement: Placement) -> None:
        super().__init__()
        plain = replace(placement, packed_ops=None)
        self._dense_name = "pooler.dense" if config.head == "pooler" else "classifier.dense"
        self._out_name = "classifier" if config.head == "pooler" else "classifier.out_proj"
        self.dense = new_linear(config.hidden_size, {"": config.hidden_size}, plain, bias=True)
        self.out = new_linear(config.hidden_size, {"": 1}, plain, bias=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """First tokens' hidden states [N, hidden_size] -> logits [N, 1]."""
        logits: torch.Tensor = self.out(self.dense(hidden).tanh())
        return logits

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield from slots_under(self._dense_name, self.dense)
        yield from slots_under(self._out_name, self.out)


class EncoderModel(LoadableModel):
    """A whole encoder.  Weights are uninitialised until loaded.

    With `packed_ops` the layers' matrices are packed, and these compute with them (`is_packed`).
    """

    config_class: ClassVar[type[EncoderConfig]]

    def __init__(
        self,
        config: EncoderConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        packed_ops: PackedEncoderOps | None = None,
        memory: ParameterMemory | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.is_packed = packed_ops is not None
        plain_ops = TorchEncoderOps()
        placement = Placement(device, dtype, plain_ops, memory=memory)
        if packed_ops is not None:
            placement = replace(placement, packed_ops=packed_ops, pack=packed_ops.pack)
        ops: AnyEncoderOps = packed_ops or plain_ops
        self.embeddings = Embeddings(config, placement, ops)
        self.layers = torch.nn.ModuleList(EncoderLayer(config, placement, ops) for _ in range(config.num_layers))
        self.head = ClassificationHead(config, placement) if config.head is not None else None
        self.expect_weights()

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, type_ids: torch.Tensor, attention: RaggedAttention
    ) -> torch.Tensor:
        """Token ids, positions from 0 and texts of a pair (0 or 1), integers [T] -> hidden states [T, hidden_size].

        The caller has begun the step on `attention`.
        """
        hidden: torch.Tensor = self.embeddings(token_ids, positions, type_ids)
        for layer in self.layers:
            hidden = layer(hidden, attention)
        return hidden

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Every checkpoint tensor the model needs, by its Hugging Face name without the model's own prefix."""
        yield from slots_under("embeddings", self.embeddings)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, EncoderLayer)
            yield from slots_under(f"encoder.layer.{index}", layer)
        if self.head is not None:
            yield from self.head.weight_slots()

    def ignores_weight(self, name: str) -> bool:
        """Tables that are computed, and heads for other uses."""
        is_computed = name in ("embeddings.position_ids", "embeddings.token_type_ids")
        return is_computed or name.startswith(("pooler.", "cls.", "lm_head."))
