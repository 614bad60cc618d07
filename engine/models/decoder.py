"""The dense decoder that Llama, Qwen2 and Qwen3 share: pre-norm blocks of attention and a gated MLP.

Tokens of all sequences lie end to end in one flat batch; which tokens see each other is
the attention backend's business alone.  Inference only.  Knows neither quantisation nor
parallelism: those live in layers and loaders.  Subclassed by the model files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from engine.attention.backend import AttentionBackend, HeadNorms
from engine.kernels.ops import Ops
from engine.kernels.select import select_ops
from engine.layers.linear import Linear
from engine.layers.packed_linear import PackedLinear
from engine.layers.packed_weight import PackedWeight
from engine.layers.placement import ParameterMemory, Placement
from engine.layers.rms_norm import RmsNorm
from engine.layers.rotary import RotaryEmbedding, Rotation
from engine.layers.select import new_embedding, new_linear
from engine.layers.weight_slot import WeightSlot, slots_under
from engine.models.config import DecoderConfig
from engine.models.loadable import LoadableModel


class Attention(torch.nn.Module):
    """Grouped-query attention of one layer; query, key and value come from one product."""

    def __init__(self, config: DecoderConfig, layer_index: int, placement: Placement) -> None:
        super().__init__()
        self._layer_index = layer_index
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = new_linear(config.hidden_size, parts, placement, bias=config.qkv_bias)
        self.o_proj = new_linear(query_size, {"": config.hidden_size}, placement, bias=config.output_bias)
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps, placement) if config.qk_norm else None
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps, placement) if config.qk_norm else None
        self._norms: HeadNorms | None = None
        if self.q_norm is not None and self.k_norm is not None:
            self._norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, config.rms_norm_eps)

    def forward(
        self,
        norm: RmsNorm,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        attention: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over norm(hidden + residual), and that sum."""
        qkv, residual = self.qkv_proj.after_norm(norm, hidden, residual)
        return self.o_proj(attention.attend(self._layer_index, qkv, rotation, self._norms)), residual

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield from self.qkv_proj.weight_slots()
        yield from slots_under("o_proj", self.o_proj)
        if self.q_norm is not None and self.k_norm is not None:
            yield from slots_under("q_norm", self.q_norm)
            yield from slots_under("k_norm", self.k_norm)


class GatedMlp(torch.nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020, https://arxiv.org/abs/2002.05202); gate and up are one product."""

    def __init__(self, config: DecoderConfig, placement: Placement) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = new_linear(config.hidden_size, parts, placement, bias=config.mlp_bias)
        self.down_proj = new_linear(config.intermediate_size, {"": config.hidden_size}, placement, bias=config.mlp_bias)

    def forward(self, norm: RmsNorm, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The block over norm(hidden + residual), and that sum."""
        gate_up, residual = self.gate_up_proj.after_norm(norm, hidden, residual)
        return self.down_proj.after_gate(gate_up), residual

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield from self.gate_up_proj.weight_slots()
        yield from slots_under("down_proj", self.down_proj)


class DecoderLayer(torch.nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)).

    The sums are left to the norm that follows them, so x travels as two tensors, `hidden` and `residual`.
    """

    def __init__(self, config: DecoderConfig, layer_index: int, placement: Placement) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.self_attn = Attention(config, layer_index, placement)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.mlp = GatedMlp(config, placement)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        attention: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.self_attn(self.input_layernorm, hidden, residual, rotation, attention)
        return self.mlp(self.post_attention_layernorm, hidden, residual)  # type: ignore[no-any-return]

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield from slots_under("input_layernorm", self.input_layernorm)
        yield from slots_under("self_attn", self.self_attn)
        yield from slots_under("post_attention_layernorm", self.post_attention_layernorm)
        yield from slots_under("mlp", self.mlp)


class DecoderModel(LoadableModel):
    """A whole decoder with its output head.  Weights are uninitialised until loaded.

    With `packed_ops` all matrices are packed, and these compute with them (`is_packed`).
    """

    config_class: ClassVar[type[DecoderConfig]]

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        packed_ops: Ops[PackedWeight] | None = None,
        memory: ParameterMemory | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.is_packed = packed_ops is not None
        placement = Placement(device, dtype, select_ops(device), packed_ops, memory)
        self._ops: Ops[torch.Tensor] | Ops[PackedWeight] = packed_ops or placement.ops
        self.embed_tokens = new_embedding(config.vocab_size, config.hidden_size, placement)
        self.rotary = RotaryEmbedding(config.rope, device=device, tables=self._ops.rotation_tables)
        self.layers = torch.nn.ModuleList(DecoderLayer(config, index, placement) for index in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.lm_head: Linear | PackedLinear | None = None
        if config.has_head and not config.tie_word_embeddings:
            self.lm_head = new_linear(config.hidden_size, {"": config.vocab_size}, placement, bias=False)
        self.expect_weights()

    @property
    def can_continue(self) -> bool:
        """Whether there are logits: some models are saved without the head that continues a text."""
        return self.config.tie_word_embeddings or self.lm_head is not None

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """Token ids and positions, integers [T] -> hidden states before the final norm [T, hidden_size].

        The caller has begun the step on `attention`.
        """
        hidden: torch.Tensor = self.embed_tokens(token_ids)
        residual: torch.Tensor | None = None
        rotation = self.rotary(positions)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotation, attention)
        return hidden if residual is None else self._ops.add(hidden, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden_size] -> scores [N, vocab_size] in the model's dtype; see `can_continue`."""
        if self.lm_head is None:
            return self.embed_tokens.project(self.norm, hidden)
        return self.lm_head.after_norm(self.norm, hidden, None)[0]

    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden_size] -> the same after the final norm, in float32."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.norm.eps)
        return wide * scale * self.norm.weight.float()

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Every checkpoint tensor the model needs, by its Hugging Face name."""
        yield from slots_under("model.embed_tokens", self.embed_tokens)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from slots_under(f"model.layers.{index}", layer)
        yield from slots_under("model.norm", self.norm)
        if self.lm_head is not None:
            yield from slots_under("lm_head", self.lm_head)

    def ignores_weight(self, name: str) -> bool:
        """Tensors that some checkpoints carry although the model computes or shares them."""
        return name.endswith("rotary_emb.inv_freq") or (self.config.tie_word_embeddings and name == "lm_head.weight")
