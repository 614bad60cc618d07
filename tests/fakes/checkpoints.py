"""Tiny random checkpoints, written on the fly with the libraries that define the formats.

`write_hf_checkpoint` saves a model of transformers' own classes, `write_tokenizer` puts a
byte-level BPE tokenizer with a chat template beside it, and `write_gguf_checkpoint` turns such
a directory into a GGUF file with the `gguf` library.  All are deterministic.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # None keeps transformers' generate() from treating any sampled id as an end.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ENCODER_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "num_labels": 1,
}
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "bert": {},
    "roberta": {"max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 1},
    "xlm-roberta": {"max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 1},
}
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the dog thinks about the answer in the end, "
    "while every question waits for something better to come along "
)


def write_hf_checkpoint(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **config: Any,
) -> None:
    """Save a random `family` ("llama", "qwen2", "qwen3") model: config.json and safetensors.

    `config` overrides fields of the family's transformers config.  A small `max_shard_size`
    ("60KB") gives several shards and an index.
    """
    fields = {**_SIZES, **_FAMILY_SIZES[family], **config}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **fields))
    _randomise(model, seed)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)


def write_encoder_checkpoint(
    directory: Path, family: str = "bert", *, role: str = "", seed: int = 0, prefix: str | None = None, **config: Any
) -> None:
    """Save a random `family` ("bert", "roberta", "xlm-roberta") model; `role` "" is the bare encoder.

    Other roles are "ForSequenceClassification" and "ForMaskedLM".  A `prefix` goes before each tensor's name.
    """
    family_config = transformers.AutoConfig.for_model(family, **{**_ENCODER_SIZES, **_FAMILY_SIZES[family], **config})
    name = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}[family]
    model = getattr(transformers, f"{name}{role or 'Model'}")(family_config)
    _randomise(model, seed)
    model.save_pretrained(directory)
    if prefix is not None:
        tensors = load_file(directory / "model.safetensors")
        save_file({prefix + key: value for key, value in tensors.items()}, directory / "model.safetensors")


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep activations near one and logits well apart, unlike the usual tiny initialisation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.copy_(1.0 + 0.1 * noise)
            elif parameter.ndim == 1 or "embed" in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)


def write_tokenizer(directory: Path) -> None:
    """Add tokenizer.json and tokenizer_config.json: `VOCAB_SIZE` byte-level tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS * 4], trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def write_gguf_checkpoint(path: Path, source: Path, quantization: str = "F32") -> None:
    """Turn the Llama or Qwen2 checkpoint in `source` into a GGUF file, as llama.cpp's converter does.

    Matrices are stored as `quantization` (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0), the rest
    as F32.  The tokenizer in `source`, if there is one, goes into the metadata.
    """
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, config["model_type"])
    _add_sizes(writer, config)
    if (source / "tokenizer.json").exists():
        _add_tokenizer(writer, source)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors.update(load_file(file))
    for name, tensor in tensors.items():
        _add_tensor(writer, config, name, tensor.float(), quantization)
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_vocab_size(config["vocab_size"])
    if config["rope_parameters"]["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_parameters"]["factor"])


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensor(
    writer: gguf.GGUFWriter, config: dict[str, Any], name: str, tensor: torch.Tensor, quantization: str
) -> None:
    if config["model_type"] == "llama" and ("q_proj" in name or "k_proj" in name):
        halves = tensor.view(-1, 2, _head_dim(config) // 2, *tensor.shape[1:])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored_name is not None, name
    kind = gguf.GGMLQuantizationType[quantization if tensor.ndim == 2 else "F32"]
    writer.add_tensor(stored_name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)


def _llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """What llama.cpp stores for Llama 3 rope scaling: the default frequencies over the scaled ones."""
    hf_config = transformers.LlamaConfig.from_dict(config)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](hf_config)
    exponents = torch.arange(0, _head_dim(config), 2).float() / _head_dim(config)
    factors: np.ndarray = (1.0 / config["rope_parameters"]["rope_theta"] ** exponents / scaled).numpy()
    return factors
