"""The dense decoder that Llama, Qwen2 and Qwen3 share: pre-norm blocks of attention and a gated MLP.

Tokens of all sequences lie end to end in one flat batch; which tokens see each other is
the attention backend's business alone.  Inference only.  Knows neither quantisation nor
parallelism: those live in layers and loaders.  Subclassed by the model files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from engine.api.errors import BrokenCheckpoint
from engine.attention.backend import AttentionBackend
from engine.layers.embedding import TokenEmbedding
from engine.layers.gated_mlp import GatedMlp
from engine.layers.linear import Linear, MergedLinear
from engine.layers.rms_norm import RmsNorm
from engine.layers.rotary import RotaryEmbedding, rotate
from engine.layers.weight_slot import WeightSlot, slots_under
from engine.models.config import DecoderConfig


class Attention(torch.nn.Module):
    """Grouped-query attention of one layer; query, key and value come from one product."""

    def __init__(self, config: DecoderConfig, layer_index: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._layer_index = layer_index
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=config.qkv_bias, device=device, dtype=dtype)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.output_bias, device=device, dtype=dtype)
        self.q_norm: RmsNorm | None = None
        self.k_norm: RmsNorm | None = None
        if config.qk_norm:
            self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps, device=device, dtype=dtype)
            self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps, device=device, dtype=dtype)

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        heads = self.qkv_proj(hidden).view(hidden.shape[0], -1, self._head_dim)
        rotated, value = heads.split((self._num_heads + self._num_kv_heads, self._num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = rotated.split((self._num_heads, self._num_kv_heads), dim=1)
            rotated = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        query, key = rotate(rotated, cos, signed_sin).split((self._num_heads, self._num_kv_heads), dim=1)
        attended = attention.attend(self._layer_index, query, key, value)
        output: torch.Tensor = self.o_proj(attended.flatten(1))
        return output

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield from self.qkv_proj.weight_slots()
        yield from slots_under("o_proj", self.o_proj)
        if self.q_norm is not None and self.k_norm is not None:
            yield from slots_under("q_norm", self.q_norm)
            yield from slots_under("k_norm", self.k_norm)


class DecoderLayer(torch.nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)).  Adds in place, to spare two allocations per layer."""

    def __init__(self, config: DecoderConfig, layer_index: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype)
        self.self_attn = Attention(config, layer_index, device=device, dtype=dtype)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype)
        self.mlp = GatedMlp(
            config.hidden_size, config.intermediate_size, bias=config.mlp_bias, device=device, dtype=dtype
        )

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        hidden.add_(self.self_attn(self.input_layernorm(hidden), cos, signed_sin, attention))
        return hidden.add_(self.mlp(self.post_attention_layernorm(hidden)))

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield from slots_under("input_layernorm", self.input_layernorm)
        yield from slots_under("self_attn", self.self_attn)
        yield from slots_under("post_attention_layernorm", self.post_attention_layernorm)
        yield from slots_under("mlp", self.mlp)


class DecoderModel(torch.nn.Module):
    """A whole decoder with its output head.  Weights are uninitialised until loaded."""

    config_class: ClassVar[type[DecoderConfig]]

    def __init__(self, config: DecoderConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self.rotary = RotaryEmbedding(config.rope, device=device)
        self.layers = torch.nn.ModuleList(
            DecoderLayer(config, index, device=device, dtype=dtype) for index in range(config.num_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype)
        self.lm_head: Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, device=device, dtype=dtype)
        self._missing = dict(self.weight_slots())

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """Token ids and positions, int64 [T] -> hidden states after the final norm [T, hidden_size].

        The caller has begun the step on `attention`.
        """
        hidden = self.embed_tokens(token_ids)
        cos, signed_sin = self.rotary(positions, self.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, signed_sin, attention)
        normed: torch.Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden_size] -> float32 scores [N, vocab_size]."""
        scores = self.embed_tokens.project(hidden) if self.lm_head is None else self.lm_head(hidden)
        return scores.float()

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

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        """Take one checkpoint tensor over.  Raises `BrokenCheckpoint` when it has no place or the wrong shape."""
        slot = self._missing.get(name)
        if slot is None:
            if self.ignores_weight(name):
                return
            raise BrokenCheckpoint(f"The model has no place for the tensor {name!r}; pull the model again.")
        if slot.shape != tuple(tensor.shape):
            raise BrokenCheckpoint(
                f"The tensor {name!r} has shape {tuple(tensor.shape)} but the model's config asks for {slot.shape}; "
                "pull the model again."
            )
        slot.load(tensor)
        del self._missing[name]

    def missing_weights(self) -> list[str]:
        """Names of tensors not loaded yet, in model order."""
        return list(self._missing)
