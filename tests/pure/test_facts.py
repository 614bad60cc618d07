"""Facts read from headers and config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from store.errors import BrokenFile, UnsupportedFormat
from store.facts import read_model_facts
from tests.fakes.gguf_files import F32_TENSOR, Q4_1_TENSOR, gguf_bytes, keys_of, safetensors_bytes, tensor


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    path.write_bytes(safetensors_bytes(tensors))


def test_facts_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata = {
        "general.architecture": "llama", "general.license": "apache-2.0", "tokenizer.chat_template": "{{ x }}",
        "llama.context_length": 2048, "llama.embedding_length": 64, "llama.block_count": 3,
    }  # fmt: skip
    # Q4_1 holds 32 elements in 20 bytes.
    tensors = [
        tensor("token_embd.weight", (64, 100), Q4_1_TENSOR, 0),
        tensor("output_norm.weight", (64,), F32_TENSOR, 4000),
    ]
    path.write_bytes(gguf_bytes(keys_of(metadata), tensors, bytes(4256)))
    facts = read_model_facts(path)
    assert (facts.architecture, facts.num_parameters, facts.quantization) == ("llama", 6464, "Q4_1")
    assert (facts.context_length, facts.embedding_length, facts.num_layers) == (2048, 64, 3)
    assert facts.license == "apache-2.0"
    assert facts.has_chat_template
    assert (facts.weight_bytes, facts.tensor_types, facts.dtype) == (4256, ("F32", "Q4_1"), "bfloat16")


def test_a_gguf_file_must_name_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(keys_of({"general.name": "x"}), []))
    with pytest.raises(BrokenFile, match="architecture"):
        read_model_facts(tmp_path / "m.gguf")


def test_facts_of_a_directory_with_shards(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "max_position_embeddings": 4096, "hidden_size": 8, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ("BF16", [8, 10], 160)})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"b": ("F32", [8], 32)})
    facts = read_model_facts(tmp_path)
    assert (facts.architecture, facts.num_parameters, facts.quantization) == ("qwen3", 88, "BF16")
    assert (facts.context_length, facts.embedding_length, facts.num_layers) == (4096, 8, 2)
    assert facts.has_chat_template
    assert facts.license is None


def test_a_directory_names_its_quantisation_method(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "awq"}})
    )
    write_safetensors(tmp_path / "model.safetensors", {"a": ("I32", [8], 32)})
    facts = read_model_facts(tmp_path)
    assert facts.quantization == "AWQ"
    assert not facts.has_chat_template


@pytest.mark.parametrize("content", ["", "[]", "{", '"x"'])
def test_a_broken_config_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BrokenFile, match=r"config\.json"):
        read_model_facts(tmp_path)


def test_directories_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=r"no config\.json"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedFormat, match="no safetensors"):
        read_model_facts(tmp_path)


@pytest.mark.parametrize("shards", [["model.safetensors"], [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]])
def test_a_second_copy_of_the_weights_does_not_count(shards: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for number, name in enumerate([*shards, "consolidated.safetensors"]):
        write_safetensors(tmp_path / name, {f"t{number}": ("F32", [8], 32)})
    assert read_model_facts(tmp_path).num_parameters == 8 * len(shards)
