"""The loader finishes with every weight in place, or says which tensors are missing, left over or misshapen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.loading.checkpoint import open_checkpoint
from engine.loading.loader import load_model
from engine.models.decoder import DecoderModel
from tests.fakes.checkpoints import write_gguf_checkpoint, write_hf_checkpoint

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def load(path: Path, load_format: str = "auto", dtype: torch.dtype = torch.float32) -> DecoderModel:
    checkpoint = open_checkpoint(path, load_format)  # type: ignore[arg-type]
    return load_model(checkpoint, device=CPU, dtype=dtype, on_progress=lambda done, total: None)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_hf_checkpoint(tmp_path, "llama")
    return tmp_path


def read(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


def replace(directory: Path, tensors: Tensors) -> None:
    save_file(tensors, directory / "model.safetensors")


def test_merged_layers_hold_their_parts_in_order(directory: Path) -> None:
    tensors, model = read(directory), load(directory)
    prefix = "model.layers.1."
    qkv = torch.cat([tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    parameters = dict(model.named_parameters())
    torch.testing.assert_close(parameters["layers.1.self_attn.qkv_proj.weight"], qkv, atol=0, rtol=0)
    torch.testing.assert_close(parameters["layers.1.mlp.gate_up_proj.weight"], gate_up, atol=0, rtol=0)
    assert model.missing_weights() == []
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_progress_counts_every_tensor(directory: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(directory)
    load_model(checkpoint, device=CPU, dtype=torch.float32, on_progress=lambda done, total: seen.append((done, total)))
    total = len(checkpoint.tensor_names())
    assert seen == [(done, total) for done in range(total + 1)]
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in read(directory).values())


def test_missing_tensors_are_named_five_at_most(directory: Path) -> None:
    tensors = read(directory)
    for name in [name for name in tensors if "layers.1." in name]:
        del tensors[name]
    replace(directory, tensors)
    with pytest.raises(BrokenCheckpoint, match=r"lacks 9 tensors") as failure:
        load(directory)
    assert failure.value.message.count("model.layers.1.") == 5


def test_left_over_tensors_are_named(directory: Path) -> None:
    replace(directory, {**read(directory), "model.layers.0.self_attn.sinks": torch.zeros(4)})
    with pytest.raises(BrokenCheckpoint, match=r"no place for \(model\.layers\.0\.self_attn\.sinks\)"):
        load(directory)


def test_nothing_is_read_when_names_do_not_match(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(directory, {**read(directory), "extra": torch.zeros(1)})
    checkpoint = open_checkpoint(directory)
    monkeypatch.setattr(checkpoint, "tensors", lambda: pytest.fail("a tensor was read"))
    with pytest.raises(BrokenCheckpoint, match="extra"):
        load_model(checkpoint, device=CPU, dtype=torch.float32, on_progress=lambda done, total: None)


def test_wrong_shape_is_refused_with_both_shapes(directory: Path) -> None:
    replace(directory, {**read(directory), "model.norm.weight": torch.ones(65)})
    with pytest.raises(BrokenCheckpoint, match=r"model\.norm\.weight.*\(65,\).*\(64,\)"):
        load(directory)


def test_known_extras_are_ignored(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    tensors = read(tmp_path)
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    replace(tmp_path, tensors)
    model = load(tmp_path)
    assert torch.equal(dict(model.named_parameters())["embed_tokens.weight"], tensors["model.embed_tokens.weight"])


def test_untied_head_must_be_there(directory: Path) -> None:
    tensors = read(directory)
    del tensors["lm_head.weight"]
    replace(directory, tensors)
    with pytest.raises(BrokenCheckpoint, match=r"lacks 1 tensors .*\(lm_head\.weight\)"):
        load(directory)


def test_a_tensor_cannot_be_loaded_twice(directory: Path) -> None:
    model = load(directory)
    with pytest.raises(BrokenCheckpoint, match=r"model\.norm\.weight"):
        model.load_weight("model.norm.weight", torch.ones(64))


def test_weights_are_converted_to_the_asked_dtype(directory: Path) -> None:
    model = load(directory, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_dummy_weights_need_only_a_config_and_are_the_same_every_time(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    first, second = load(directory, "dummy"), load(directory, "dummy")
    for (name, left), right in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right), name
        assert left.isfinite().all(), name
    weights = dict(first.named_parameters())
    assert torch.equal(weights["norm.weight"], torch.ones(64))
    assert not torch.equal(weights["layers.0.mlp.down_proj.weight"], weights["layers.1.mlp.down_proj.weight"])


def test_dummy_takes_the_config_of_a_gguf_file(directory: Path, tmp_path: Path) -> None:
    write_gguf_checkpoint(tmp_path / "model.gguf", directory, "Q8_0")
    assert load(tmp_path / "model.gguf", "dummy").config.hidden_size == 64


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(BrokenCheckpoint, match=lost.name):
        open_checkpoint(tmp_path)


def test_index_must_agree_with_its_shards(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shard = next(iter(index["weight_map"].values()))
    index_path.write_text(json.dumps({"weight_map": {**index["weight_map"], "model.absent": shard}}))
    with pytest.raises(BrokenCheckpoint, match=r"model\.absent"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file_name", ["../model.safetensors", "/etc/passwd", "shard.bin", 7])
def test_index_cannot_name_files_elsewhere(directory: Path, file_name: object) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file_name}}))
    with pytest.raises(BrokenCheckpoint, match="is no shard"):
        open_checkpoint(directory)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenCheckpoint, match="no model at"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(BrokenCheckpoint, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BrokenCheckpoint, match="JSON object"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="safetensors or GGUF"):
        open_checkpoint(tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(UnsupportedModel, match="not a GGUF file"):
        open_checkpoint(tmp_path / "weights.bin")
    with pytest.raises(UnsupportedModel, match="no GGUF file"):
        open_checkpoint(tmp_path, "gguf")


def test_truncated_safetensors_is_refused(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BrokenCheckpoint, match="not a sound safetensors file"):
        open_checkpoint(directory)


def test_integer_weights_are_refused(directory: Path) -> None:
    replace(directory, {**read(directory), "model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match="I8"):
        open_checkpoint(directory)


def test_directory_with_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path / "source", "llama")
    (tmp_path / "one").mkdir()
    write_gguf_checkpoint(tmp_path / "one" / "model.gguf", tmp_path / "source")
    assert load(tmp_path / "one").missing_weights() == []
    (tmp_path / "one" / "second.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModel, match="2 GGUF models"):
        open_checkpoint(tmp_path / "one")
