"""Which files of a repository a model needs."""

from __future__ import annotations

import pytest

from store.errors import ModelNotFound, UnsupportedFormat
from store.names import RepoFile
from store.sources.selection import choose_files, gguf_quantization

TEXT = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
NOISE = ["README.md", ".gitattributes", "pytorch_model.bin", "original/consolidated.00.pth", "onnx/model.onnx"]


def names(*files: str) -> list[RepoFile]:
    return [RepoFile(file) for file in files]


def test_safetensors_are_preferred_and_pickles_never_taken() -> None:
    chosen = choose_files(names(*NOISE, *TEXT, "model.safetensors", "model-Q4_K_M.gguf"))
    assert set(chosen.files) == {*TEXT, "model.safetensors"}
    assert chosen.entry is None


def test_shards_come_with_their_index() -> None:
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    chosen = choose_files(names(*TEXT, *shards, "model.safetensors.index.json", "consolidated.safetensors"))
    assert set(chosen.files) == {*TEXT, *shards, "model.safetensors.index.json"}


def test_a_missing_shard_is_refused() -> None:
    with pytest.raises(UnsupportedFormat, match="1 of its 2"):
        choose_files(names(*TEXT, "model-00001-of-00002.safetensors", "model.safetensors.index.json"))


def test_a_quantisation_chooses_one_gguf() -> None:
    files = names(
        "config.json", "model.safetensors", "M.Q4_K_M.gguf", "M.Q4_K_S.gguf", "M-Q8_0.gguf", "mmproj-F16.gguf"
    )
    assert choose_files(files, quantization="Q4_K_M").entry == "M.Q4_K_M.gguf"
    assert choose_files(files, quantization="Q8_0").files == ("M-Q8_0.gguf",)
    with pytest.raises(ModelNotFound, match="Q4_K_M, Q4_K_S, Q8_0"):
        choose_files(files, quantization="F16")


def test_without_a_quantisation_the_usual_one_is_taken() -> None:
    assert choose_files(names("M.Q8_0.gguf", "M.Q4_K_M.gguf", "M.Q2_K.gguf")).entry == "M.Q4_K_M.gguf"
    assert choose_files(names("only.gguf")).entry == "only.gguf"
    with pytest.raises(UnsupportedFormat, match="IQ1_S, IQ2_XXS"):
        choose_files(names("M.IQ1_S.gguf", "M.IQ2_XXS.gguf"))


def test_one_file_by_name() -> None:
    assert choose_files(names("a/x.gguf", "b.gguf"), file=RepoFile("a/x.gguf")).entry == "a/x.gguf"
    with pytest.raises(ModelNotFound):
        choose_files(names("b.gguf"), file=RepoFile("c.gguf"))


def test_a_split_gguf_is_chosen_with_all_its_parts() -> None:
    parts = [f"Q4_K_M/M-Q4_K_M-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    files = names("M-Q8_0.gguf", *reversed(parts))
    for chosen in (choose_files(files), choose_files(files, quantization="Q4_K_M"),
                   choose_files(files, file=RepoFile(parts[2]))):  # fmt: skip
        assert (list(chosen.files), chosen.entry) == (parts, parts[0])
    with pytest.raises(UnsupportedFormat, match="2 of the 3 parts"):
        choose_files(names("M-Q8_0.gguf", *parts[:2]), quantization="Q4_K_M")


@pytest.mark.parametrize("files", [[], NOISE, [*TEXT, "pytorch_model.bin"], ["big-00001-of-00002.gguf"]])
def test_nothing_that_can_be_run(files: list[str]) -> None:
    with pytest.raises(UnsupportedFormat):
        choose_files(names(*files))


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("model-fp16.gguf", "F16"),
        ("Llama-3-IQ3_XXS.gguf", "IQ3_XXS"),
        ("Q8_0/model.gguf", "Q8_0"),
        ("Qwen3-8B.gguf", None),
    ],
)
def test_the_quantisation_in_a_file_name(name: str, quantization: str | None) -> None:
    assert gguf_quantization(name) == quantization


def test_what_sentence_transformers_writes_comes_along() -> None:
    texts = ["modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"]
    chosen = choose_files(names(*NOISE, *TEXT, *texts, "openvino/config.json", "model.safetensors"))
    assert set(chosen.files) == {*TEXT, *texts, "model.safetensors"}
