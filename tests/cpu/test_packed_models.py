"""Models load packed where they should, compute what their dequantised weights compute, and keep no floats."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api.config import Quantization
from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.layers.packed_weight import PackedMatrix, PackedWeight
from engine.loading.checkpoint import open_checkpoint
from engine.loading.loader import load_model, packs_weights, quantizes_weights, weight_bytes
from engine.loading.quantize import quantize_rows
from engine.models.decoder import DecoderModel
from tests.fakes.checkpoints import VOCAB_SIZE, write_gguf_checkpoint, write_hf_checkpoint
from tests.fakes.dense_attention import DenseAttention, ragged_metadata

CPU = torch.device("cpu")


def load(
    path: Path,
    quantization: Quantization | None,
    load_format: str = "auto",
    *,
    dtype: torch.dtype = torch.float32,
    folder: Path | None = None,
) -> DecoderModel:
    return load_model(
        open_checkpoint(path, load_format),  # type: ignore[arg-type]
        device=CPU,
        dtype=dtype,
        on_progress=lambda done, total: None,
        quantization=quantization,
        packed_folder=folder,
    )


def logits(model: DecoderModel) -> torch.Tensor:
    token_ids = torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(3))
    attention = DenseAttention(model.config.num_kv_heads, model.config.head_dim)
    attention.begin_step(ragged_metadata(20, 40))
    positions = torch.cat((torch.arange(20), torch.arange(40)))
    with torch.inference_mode():
        return model.logits(model(token_ids, positions, attention))


def segments(weight: PackedWeight) -> list[tuple[int | torch.dtype, int]]:
    """Bits or dtype, and outputs."""
    return [
        (segment.coding.bits if isinstance(segment, PackedMatrix) else segment.data.dtype, segment.out_features)
        for segment in weight.segments
    ]


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_packed_file_gives_the_logits_of_the_dequantised_one(family: str, quantization: str, tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, family, tie_word_embeddings=family == "qwen2")
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path, quantization)
    packed, plain = load(tmp_path / "model.gguf", "auto"), load(tmp_path / "model.gguf", None)
    assert packed.is_packed
    assert not plain.is_packed
    assert packed.num_parameters == plain.num_parameters == sum(part.numel() for part in plain.parameters())
    torch.testing.assert_close(logits(packed), logits(plain), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_float_checkpoint_is_quantised_when_asked(family: str, tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    packed, rounded = load(tmp_path, "int8"), load(tmp_path, None)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(quantize_rows(name, parameter).dequantize())
    torch.testing.assert_close(logits(packed), logits(rounded), atol=1e-4, rtol=1e-4)


def test_only_norms_and_biases_stay_floats(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "qwen2")
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path, "Q8_0")
    model = load(tmp_path / "model.gguf", "auto")
    assert {parameter.ndim for parameter in model.parameters()} == {1}
    assert {parameter.dtype for parameter in model.parameters()} == {model.dtype} == {torch.float32}
    assert model.missing_weights() == []
    assert len(list(model.packed_layers())) == 2 + 2 * 4


def test_merged_layers_are_as_few_segments_as_their_types_allow(tmp_path: Path) -> None:
    """Query and key heads of 32 and 16 rows; a file of two types, as "mixed" quantisations are."""
    write_hf_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path, "Q4_0")
    layers = dict(load(tmp_path / "model.gguf", "auto").packed_layers())
    assert segments(layers["layers.0.self_attn.qkv_proj"].weight) == [(4, 64 + 2 * 32)]
    assert segments(layers["layers.1.mlp.gate_up_proj"].weight) == [(4, 2 * 128)]
    assert segments(layers["embed_tokens"].weight) == [(4, VOCAB_SIZE)]
    assert "lm_head" not in layers


def test_a_float_matrix_beside_quantised_ones_is_quantised(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama")
    path = write_mixed_gguf(tmp_path)
    model, plain = load(path, "auto"), load(path, None)
    layers = dict(model.packed_layers())
    assert segments(layers["layers.0.self_attn.qkv_proj"].weight) == [(4, 96), (8, 32)]
    expected = dict(plain.named_parameters())["layers.0.self_attn.qkv_proj.weight"]
    found = layers["layers.0.self_attn.qkv_proj"].weight.dequantize()
    assert torch.equal(found[:96], expected[:96])
    torch.testing.assert_close(found[96:], expected[96:], atol=0.005, rtol=0)
    assert weight_bytes(open_checkpoint(path), torch.float32, quantization="auto", device=CPU) == model.weight_bytes


def write_mixed_gguf(directory: Path) -> Path:
    """All matrices as Q4_0, but for the values of attention, as float16."""
    write_gguf_checkpoint(directory / "source.gguf", directory, "Q4_0")
    reader = gguf.GGUFReader(directory / "source.gguf")
    plain = load_file(directory / "model.safetensors")
    writer = gguf.GGUFWriter(directory / "mixed.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(
                field.name, field.contents(), field.types[0], field.types[1] if field.types[1:] else None
            )
    for tensor in reader.tensors:
        if tensor.name.endswith("attn_v.weight"):
            layer = tensor.name.split(".")[1]
            writer.add_tensor(tensor.name, plain[f"model.layers.{layer}.self_attn.v_proj.weight"].half().numpy())
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / "mixed.gguf"


@pytest.mark.parametrize("quantization", ["auto", "int8", "none", None])
def test_the_size_is_known_before_loading(quantization: Quantization | None, tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "qwen2", hidden_size=80, num_attention_heads=5, num_key_value_heads=5)
    write_hf_checkpoint(tmp_path / "source", "llama")
    write_gguf_checkpoint(tmp_path / "source" / "model.gguf", tmp_path / "source", "Q4_1")
    for path in (tmp_path, tmp_path / "source" / "model.gguf"):
        model = load(path, quantization)
        expected = model.weight_bytes
        if not model.is_packed:
            expected -= sum(buffer.nbytes for buffer in model.buffers())
        found = weight_bytes(open_checkpoint(path), torch.float32, quantization=quantization, device=CPU)
        assert found == expected


def test_what_packs_is_decided_by_checkpoint_setting_and_device(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama")
    write_gguf_checkpoint(tmp_path / "half.gguf", tmp_path, "F16")
    write_gguf_checkpoint(tmp_path / "coded.gguf", tmp_path, "Q4_0")
    choices: tuple[Quantization, ...] = ("auto", "int8", "none")
    for path, expected in [
        (tmp_path, [False, True, False]),
        (tmp_path / "half.gguf", [False, True, False]),
        (tmp_path / "coded.gguf", [True, True, False]),
    ]:
        checkpoint = open_checkpoint(path, "safetensors" if path == tmp_path else "auto")
        assert [quantizes_weights(checkpoint, choice) for choice in choices] == expected
    assert all(packs_weights(choice, CPU) for choice in choices)
    assert not packs_weights(None, CPU)
    assert not packs_weights("auto", torch.device("cuda"))
    with pytest.raises(UnsupportedModel, match=r"on the CPU only.*--quantization auto"):
        packs_weights("int8", torch.device("cuda"))


FLOAT_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("stored", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_floats_stay_as_the_checkpoint_has_them(family: str, stored: torch.dtype, tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, family, dtype=stored, tie_word_embeddings=family == "qwen2")
    packed, plain = load(tmp_path, "auto"), load(tmp_path, None)
    kinds = {kind for _, layer in packed.packed_layers() for kind, _ in segments(layer.weight)}
    assert kinds == {stored}
    assert torch.equal(logits(packed), logits(plain))
    assert {parameter.dtype for parameter in packed.parameters()} == {torch.float32}


@pytest.mark.parametrize("asked", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("stored", FLOAT_DTYPES, ids=str)
def test_floats_are_rounded_only_to_save_memory(stored: torch.dtype, asked: torch.dtype, tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", dtype=stored)
    model = load(tmp_path, "auto", dtype=asked)
    kinds = {kind for _, layer in model.packed_layers() for kind, _ in segments(layer.weight)}
    assert kinds == {asked if asked.itemsize < stored.itemsize else stored}
    found = weight_bytes(open_checkpoint(tmp_path), asked, quantization="auto", device=CPU)
    assert found == model.weight_bytes


def test_a_quantised_file_can_be_expanded(tmp_path: Path) -> None:
    """Its float matrices stay what they are."""
    write_hf_checkpoint(tmp_path, "llama")
    path = write_mixed_gguf(tmp_path)
    expanded, plain = load(path, "none"), load(path, None)
    layers = dict(expanded.packed_layers())
    expected = [(torch.float32, 96), (torch.float16, 32)]
    assert segments(layers["layers.0.self_attn.qkv_proj"].weight) == expected
    assert torch.equal(logits(expanded), logits(plain))


def test_float_models_are_not_kept_twice(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path / "model", "llama")
    model = load(tmp_path / "model", "auto", folder=tmp_path / "packed")
    assert model.is_packed
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("quantization", ["int8", "auto"])
def test_dummy_weights_can_be_packed(quantization: Quantization, tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    first, second = load(tmp_path, quantization, "dummy"), load(tmp_path, quantization, "dummy")
    kind = 8 if quantization == "int8" else torch.bfloat16
    assert all(segments(layer.weight)[0][0] == kind for _, layer in first.packed_layers())
    assert torch.equal(logits(first), logits(second))
    assert logits(first).isfinite().all()


def test_wrong_shapes_and_odd_numbers_are_refused(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama")
    name, path = "model.layers.0.mlp.down_proj.weight", tmp_path / "model.safetensors"
    tensors = load_file(path)
    for values, words in [
        (torch.zeros(64, 96), rf"{name}.*\(64, 96\)"),
        (torch.zeros(64), rf"{name}.*\(64,\)"),
        (torch.full((64, 128), torch.nan), rf"{name}.*not finite"),
    ]:
        save_file({**tensors, name: values}, path)
        with pytest.raises(BrokenCheckpoint, match=words):
            load(tmp_path, "int8")


def test_loading_leaves_the_number_of_threads(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama")
    before = torch.get_num_threads()
    load(tmp_path, "int8")
    assert torch.get_num_threads() == before
