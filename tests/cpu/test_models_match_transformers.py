"""Every model family gives transformers' logits, in one ragged batch, from a tiny random checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.loading.checkpoint import open_checkpoint
from engine.loading.loader import load_model
from engine.models.decoder import DecoderModel
from engine.models.registry import model_config
from tests.fakes.checkpoints import VOCAB_SIZE, write_hf_checkpoint
from tests.fakes.dense_attention import DenseAttention, ragged_metadata

CPU = torch.device("cpu")
LENGTHS = (1, 7, 40, 3)

LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}}),
    "llama-yarn-untruncated": ("llama", {"rope_parameters": {**YARN, "truncate": False, "attention_factor": 1.2}}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-mha": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-group-3": ("llama", {"hidden_size": 96, "num_attention_heads": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": YARN}),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def load(path: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return load_model(open_checkpoint(path), device=CPU, dtype=dtype, on_progress=lambda done, total: None)


def our_logits(model: DecoderModel, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Logits of all tokens [T, vocab], the sequences as one flat batch."""
    attention = DenseAttention(model.config.num_kv_heads, model.config.head_dim)
    attention.begin_step(ragged_metadata(*(len(sequence) for sequence in sequences)))
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    with torch.inference_mode():
        return model.logits(model(torch.cat(sequences), positions, attention))


def transformers_logits(path: Path, sequences: list[torch.Tensor]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.cat([model(sequence.unsqueeze(0)).logits[0] for sequence in sequences])


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    write_hf_checkpoint(tmp_path, family, **config)
    expected = transformers_logits(tmp_path, prompts())
    assert expected.std() > 0.5  # a checkpoint whose logits are all alike would prove nothing
    torch.testing.assert_close(our_logits(load(tmp_path), prompts()), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_sharded_checkpoint_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, family, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = transformers_logits(tmp_path, prompts())
    torch.testing.assert_close(our_logits(load(tmp_path), prompts()), expected, atol=1e-4, rtol=1e-4)


def test_token_by_token_equals_all_at_once(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "qwen3")
    model, sequence = load(tmp_path), prompts()[1]
    attention, steps = DenseAttention(model.config.num_kv_heads, model.config.head_dim), []
    with torch.inference_mode():
        for position, token_id in enumerate(sequence):
            attention.begin_step(ragged_metadata(1))
            steps.append(model.logits(model(token_id.view(1), torch.tensor([position]), attention)))
    torch.testing.assert_close(torch.cat(steps), our_logits(model, [sequence]), atol=1e-5, rtol=1e-5)


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    logits = our_logits(load(tmp_path, torch.bfloat16), prompts())
    assert logits.dtype == torch.bfloat16
    expected = transformers_logits(tmp_path, prompts())
    assert torch.nn.functional.cosine_similarity(logits.float(), expected).min() > 0.999


def test_old_spelling_of_rope_scaling_means_the_same() -> None:
    sizes = {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    for rope in (LINEAR, LLAMA3, YARN, DYNAMIC):
        scaling = {"type" if key == "rope_type" else key: value for key, value in rope.items() if key != "rope_theta"}
        old = model_config({**sizes, "rope_theta": rope["rope_theta"], "rope_scaling": scaling})
        assert old == model_config({**sizes, "rope_parameters": rope})
    assert model_config({**sizes, "rope_theta": 5e5, "rope_scaling": None}).rope.theta == 5e5


UNSUPPORTED: dict[str, Callable[[dict[str, Any]], None]] = {
    "MambaForCausalLM": lambda config: config.update(model_type="mamba", architectures=["MambaForCausalLM"]),
    "LlamaForSequenceClassification": lambda config: config.update(architectures=["LlamaForSequenceClassification"]),
    "Sliding-window": lambda config: config.update(layer_types=["full_attention", "sliding_attention"]),
    "gelu": lambda config: config.update(hidden_act="gelu"),
    "longrope": lambda config: config.update(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
    "Quantised safetensors": lambda config: config.update(quantization_config={"quant_method": "awq"}),
    "Rotating only part": lambda config: config.update(partial_rotary_factor=0.5),
}
BROKEN: dict[str, Callable[[dict[str, Any]], None]] = {
    "hidden_size": lambda config: config.update(hidden_size="64"),
    "num_hidden_layers": lambda config: config.pop("num_hidden_layers"),
    "key heads": lambda config: config.update(num_key_value_heads=3),
    "vocab_size": lambda config: config.update(vocab_size=-1),
    "rms_norm_eps": lambda config: config.update(rms_norm_eps=float("nan")),
    "rope_parameters": lambda config: config.update(rope_parameters=7),
    "factor": lambda config: config.update(rope_parameters={"rope_type": "linear"}),
    "layer_types": lambda config: config.update(layer_types=3),
}


def small_config() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }


@pytest.mark.parametrize("named", UNSUPPORTED)
def test_unsupported_config_is_refused_with_its_reason(named: str) -> None:
    config = small_config()
    UNSUPPORTED[named](config)
    with pytest.raises(UnsupportedModel, match=named):
        model_config(config)


@pytest.mark.parametrize("named", BROKEN)
def test_broken_config_is_refused_by_field(named: str) -> None:
    config = small_config()
    BROKEN[named](config)
    with pytest.raises(BrokenCheckpoint, match=named):
        model_config(config)
