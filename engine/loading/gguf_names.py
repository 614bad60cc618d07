"""GGUF tensor names -> Hugging Face names, for the decoders of `engine.models`.

llama.cpp's naming: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#standardized-tensor-names
"""

from __future__ import annotations

import re

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

ROPE_FACTORS = "rope_freqs.weight"
"""Frequency factors of Llama 3: part of the config, not a weight of the model."""


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name; a name that has none is returned as it is, for the loader to report."""
    if match := _BLOCK.fullmatch(gguf_name):
        layer, module, kind = match.groups()
        if module in _IN_BLOCK:
            return f"model.layers.{int(layer)}.{_IN_BLOCK[module]}.{kind}"
    module, _, kind = gguf_name.rpartition(".")
    return f"{_TOP_LEVEL[module]}.{kind}" if module in _TOP_LEVEL else gguf_name
