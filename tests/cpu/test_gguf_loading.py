"""GGUF files load as the model they were made from, and every quantisation as the `gguf` library reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.api.architectures import READABLE_GGUF_TYPES
from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.loading.checkpoint import open_checkpoint
from engine.loading.gguf_config import config_from_gguf
from engine.loading.gguf_dequantize import dequantize
from engine.loading.loader import load_model
from engine.models.decoder import DecoderModel
from engine.models.registry import model_config
from engine.text.stage import open_text_files
from store.formats.gguf import GgufHeader, read_gguf_header
from store.formats.gguf_types import GGUF_BLOCK_SIZES
from tests.fakes.checkpoints import VOCAB_SIZE, write_gguf_checkpoint, write_hf_checkpoint, write_tokenizer
from tests.fakes.dense_attention import DenseAttention, ragged_metadata
from tests.fakes.gguf_files import split_gguf

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
}


def load(path: Path) -> DecoderModel:
    return load_model(open_checkpoint(path), device=CPU, dtype=torch.float32, on_progress=lambda done, total: None)


def logits(model: DecoderModel) -> torch.Tensor:
    token_ids = torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(3))
    attention = DenseAttention(model.config.num_kv_heads, model.config.head_dim)
    attention.begin_step(ragged_metadata(20, 40))
    positions = torch.cat((torch.arange(20), torch.arange(40)))
    with torch.inference_mode():
        return model.logits(model(token_ids, positions, attention))


@pytest.mark.parametrize("case", CASES)
def test_float32_file_is_the_model_it_was_made_from(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    write_hf_checkpoint(tmp_path, family, **config)
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path, "F32")
    torch.testing.assert_close(logits(load(tmp_path / "model.gguf")), logits(load(tmp_path)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantised_file_gives_the_logits_of_its_dequantised_weights(
    family: str, quantization: str, tmp_path: Path
) -> None:
    """Weights rounded through the library, then loaded as plain float32, are the reference."""
    write_hf_checkpoint(tmp_path, family)
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path, quantization)
    reference = load(tmp_path)
    kind = gguf.GGMLQuantizationType[quantization]
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim == 2:
                stored = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind).copy()))
    torch.testing.assert_close(logits(load(tmp_path / "model.gguf")), logits(reference), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("type_name", READABLE_GGUF_TYPES)
def test_dequantisers_equal_the_library(type_name: str) -> None:
    """Random bits in every field but the scales, which stay finite; more blocks than one chunk holds."""
    elements, block_bytes = GGUF_BLOCK_SIZES[type_name]
    num_blocks = (1 << 18) // elements + 3
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
    halves |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    for start in halves.get(type_name, []):
        data[:, start : start + 2] = rng.normal(size=(num_blocks, 1)).astype(np.float16).view(np.uint8)
    if type_name in ("F32", "F16", "BF16"):
        data = gguf.quants.quantize(
            rng.normal(size=(num_blocks, 1)).astype(np.float32), gguf.GGMLQuantizationType[type_name]
        ).view(np.uint8)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name])
    actual = dequantize(torch.from_numpy(data).flatten(), type_name, (num_blocks, elements))
    np.testing.assert_array_equal(actual.float().numpy(), expected.reshape(num_blocks, elements))


def test_header_and_config_are_those_of_the_source(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", tie_word_embeddings=True, dtype=torch.float16)
    write_tokenizer(tmp_path)
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path, "Q8_0")
    header = read_gguf_header(tmp_path / "model.gguf")
    assert len(header.metadata["tokenizer.ggml.tokens"]) == VOCAB_SIZE
    embedding = header.tensors["token_embd.weight"]
    assert (embedding.shape, embedding.type_name) == ((VOCAB_SIZE, 64), "Q8_0")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    ours, source = model_config(checkpoint.config), model_config(open_checkpoint(tmp_path, "safetensors").config)
    assert ours.dtype == "bfloat16"
    assert source.dtype == "float16"
    assert (ours.hidden_size, ours.num_kv_heads, ours.head_dim, ours.vocab_size, ours.tie_word_embeddings) == (
        source.hidden_size,
        source.num_kv_heads,
        source.head_dim,
        source.vocab_size,
        True,
    )
    assert sorted(checkpoint.tensor_names()) == sorted(open_checkpoint(tmp_path, "safetensors").tensor_names())


def header_of(**metadata: Any) -> GgufHeader:
    fields = {"general.architecture": "llama", "llama.embedding_length": 64, "llama.attention.head_count": 4}
    return GgufHeader(3, {**fields, **{key.replace("__", "."): value for key, value in metadata.items()}}, {}, 32)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__rope__dimension_count": 8}, "part of each head"),
        ({"llama__attention__value_length": 8, "llama__attention__key_length": 16}, "another width"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__attn_factor": 2.0}, "combination"),
    ],
)
def test_unsupported_metadata_is_refused(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        config_from_gguf(header_of(**metadata), None)


def test_head_width_must_be_known() -> None:
    with pytest.raises(BrokenCheckpoint, match="how wide"):
        config_from_gguf(header_of(llama__attention__head_count=[4, 4]), None)


def test_yarn_metadata_becomes_yarn_rope() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    header = header_of(**{f"llama__rope__scaling__{key}": value for key, value in scaling.items()})
    rope = config_from_gguf(header, None)["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 128)


def test_unreadable_quantisation_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 66), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="IQ2_XXS"):
        open_checkpoint(tmp_path / "model.gguf")


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.gguf"
    write_gguf_checkpoint(path, tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BrokenCheckpoint, match="truncated"):
        open_checkpoint(path)


@pytest.mark.parametrize("opened", [0, 2])
def test_a_model_in_parts_is_the_whole_one(opened: int, tmp_path: Path) -> None:
    """Whichever part is named; the directory of the parts is a model too."""
    write_hf_checkpoint(tmp_path, "llama")
    write_tokenizer(tmp_path)
    whole, folder = tmp_path / "model.gguf", tmp_path / "parts"
    write_gguf_checkpoint(whole, tmp_path, "Q8_0")
    folder.mkdir()
    parts = [part.rename(folder / part.name) for part in split_gguf(whole, 3)]
    torch.testing.assert_close(logits(load(parts[opened])), logits(load(whole)), atol=0, rtol=0)
    assert open_checkpoint(folder).files() == parts
    tokenizer, template = open_text_files(parts[opened])
    assert template is not None and tokenizer.encode("the dog") == open_text_files(whole)[0].encode("the dog")
    parts[1].unlink()
    with pytest.raises(BrokenCheckpoint, match=r"model-00002-of-00003\.gguf cannot be read"):
        open_checkpoint(parts[0])
