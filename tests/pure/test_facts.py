"""Facts read from headers and config.json."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from store.errors import BrokenFile, UnsupportedFormat
from store.facts import read_model_facts


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    header, offset = {}, 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(offset))


def _gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def write_gguf(
    path: Path, metadata: dict[str, str | int], tensors: list[tuple[str, tuple[int, ...], int, int]]
) -> None:
    """Tensors are (name, dimensions, type id, bytes); strings and unsigned 32-bit metadata only."""
    out = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        encoded = struct.pack("<I", 8) + _gguf_string(value) if isinstance(value, str) else struct.pack("<II", 4, value)
        out += _gguf_string(key) + encoded
    offset = 0
    for name, dimensions, type_id, num_bytes in tensors:
        out += _gguf_string(name) + struct.pack(
            f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, type_id, offset
        )
        offset += (num_bytes + 31) // 32 * 32
    out += bytes(-len(out) % 32)
    path.write_bytes(out + bytes(offset))


def test_facts_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata: dict[str, str | int] = {
        "general.architecture": "llama", "general.license": "apache-2.0", "tokenizer.chat_template": "{{ x }}",
        "llama.context_length": 2048, "llama.embedding_length": 64, "llama.block_count": 3,
    }  # fmt: skip
    # Q4_1 holds 32 elements in 20 bytes.
    write_gguf(path, metadata, [("token_embd.weight", (64, 100), 3, 4000), ("output_norm.weight", (64,), 0, 256)])
    facts = read_model_facts(path)
    assert (facts.architecture, facts.num_parameters, facts.quantization) == ("llama", 6464, "Q4_1")
    assert (facts.context_length, facts.embedding_length, facts.num_layers) == (2048, 64, 3)
    assert facts.license == "apache-2.0"
    assert facts.has_chat_template


def test_a_gguf_file_must_name_its_architecture(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {"general.name": "x"}, [])
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
