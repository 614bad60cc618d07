"""Which models take the compiled path, and that those with float weights say what transformers says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.api.config import EngineConfig
from engine.api.errors import UnsupportedModel
from engine.build import build_engine
from engine.compiled_path import CompiledPath, choose_compiled_path
from engine.loading.checkpoint import open_checkpoint
from engine.models.registry import model_config
from engine.runner.recorded_steps import RecordedSteps
from tests.fakes.checkpoints import write_gguf_checkpoint, write_hf_checkpoint, write_tokenizer

NUM_NEW_TOKENS = 24
PROMPTS = [[5, 6, 7], list(range(9, 60)), list(range(100, 117))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


def choose(path: Path, *, device: str = "cpu", **settings: Any) -> CompiledPath | None:
    checkpoint = open_checkpoint(path)
    config = EngineConfig(model=str(path), **settings)
    return choose_compiled_path(config, checkpoint, model_config(checkpoint.config), torch.device(device), None)


def test_keys_and_values_are_as_exact_as_the_weights(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path, "Q4_0")
    for path, settings, expected in [
        (tmp_path, {}, torch.float32),
        (tmp_path, {"dtype": "float32"}, torch.float32),
        (tmp_path, {"dtype": "bfloat16"}, torch.float16),
        (tmp_path, {"quantization": "int8"}, torch.float16),
        (tmp_path / "model.gguf", {}, torch.float16),
        (tmp_path / "model.gguf", {"dtype": "float32"}, torch.float32),
        (tmp_path / "model.gguf", {"quantization": "none"}, torch.float32),
    ]:
        chosen = choose(path, **settings)
        assert chosen is not None
        assert chosen.cache_dtype() == expected, settings


def test_models_of_odd_sizes_are_left_to_torch_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Quantised weights come in groups of 32 inputs, floats in vectors of 16."""
    write_hf_checkpoint(tmp_path / "80", "llama", hidden_size=80, num_attention_heads=5, num_key_value_heads=5)
    write_hf_checkpoint(tmp_path / "72", "llama", hidden_size=72, num_attention_heads=3, num_key_value_heads=3)
    assert choose(tmp_path / "80") is not None
    with pytest.raises(UnsupportedModel, match=r"80, is no multiple of 32; use --quantization none"):
        choose(tmp_path / "80", quantization="int8")
    with caplog.at_level(logging.WARNING):
        assert choose(tmp_path / "72") is None
    assert "hidden size, 72, is no multiple of 16" in caplog.text


def test_other_devices_have_their_own_path(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama")
    assert choose(tmp_path, device="cuda") is None


def expected_tokens(path: Path) -> list[tuple[int, ...]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    lengths = {"max_new_tokens": NUM_NEW_TOKENS, "min_new_tokens": NUM_NEW_TOKENS}
    with torch.inference_mode():
        outputs = [model.generate(torch.tensor([ids]), do_sample=False, pad_token_id=0, **lengths) for ids in PROMPTS]
    return [tuple(output[0, len(ids) :].tolist()) for ids, output in zip(PROMPTS, outputs, strict=True)]


def tokens(path: Path, **settings: Any) -> list[tuple[int, ...]]:
    llm = LLM(path, device="cpu", max_model_len=128, max_num_seqs=4, **settings)
    return [
        output.outputs[0].token_ids for output in llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_float_checkpoints_give_transformers_tokens(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, family, dtype=dtype, tie_word_embeddings=dtype == torch.float16)
    write_tokenizer(tmp_path)
    assert tokens(tmp_path) == expected_tokens(tmp_path)


@pytest.mark.parametrize(("quantization", "file_type"), [("auto", "F16"), ("none", "F16"), ("none", "F32")])
def test_float_gguf_files_give_transformers_tokens(quantization: str, file_type: str, tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", dtype=torch.float16)
    write_tokenizer(tmp_path)
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path, file_type)
    assert tokens(tmp_path / "model.gguf", quantization=quantization) == expected_tokens(tmp_path)


@pytest.mark.parametrize("quantization", ["auto", "none", "int8"])
def test_every_setting_computes_in_recorded_steps(quantization: str, tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    config = EngineConfig(model=str(tmp_path), device="cpu", quantization=quantization, max_model_len=128)  # type: ignore[arg-type]
    assert isinstance(build_engine(config, lambda *_: None).runner.replayed, RecordedSteps)
