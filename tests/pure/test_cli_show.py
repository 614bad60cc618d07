"""`quire show` of models that are not installed: the card comes from headers on the hub, and nothing is kept."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.command_here import quire
from tests.fakes.gguf_files import Q4_0_TENSOR, gguf_bytes, keys_of, tensor
from tests.fakes.hub import FakeHub, unused_endpoint

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 61,
    "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
WEIGHT_BYTES = 4_000_000


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture(autouse=True)
def _own_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: FakeHub) -> None:
    for name in ("QUIRE_CONFIG_DIR", "QUIRE_STATE_DIR", "QUIRE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    for name in ("QUIRE_DEBUG", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def checkpoint(config: dict[str, Any]) -> dict[str, bytes]:
    entry = {"dtype": "BF16", "shape": [WEIGHT_BYTES // 2], "data_offsets": [0, WEIGHT_BYTES]}
    header = json.dumps({"weight": entry}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(WEIGHT_BYTES)
    return {"config.json": json.dumps(config).encode(), "tokenizer.json": b"{}", "model.safetensors": weights}


def test_a_checkpoint_on_the_hub(hub: FakeHub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hub.add("org/qwen", checkpoint(CONFIG))

    assert quire("show", "org/qwen") == 0

    shown = capsys.readouterr()
    lines = dict(line.split(None, 1) if "  " not in line else line.split("  ", 1) for line in shown.out.splitlines())
    found = {label.strip(): value.strip() for label, value in lines.items()}
    assert (found["architecture"], found["parameters"], found["context length"]) == ("qwen2", "2.0M", "131,072")
    assert found["KV cache"] == "28,672 bytes a token, 3.8 GB for the whole context"
    assert found["weights"] == found["download size"] == "4 MB"
    assert "path" not in found
    assert "Not installed; get it with `quire pull org/qwen` (4 MB to fetch)." in shown.err
    assert hub.sent_bytes < WEIGHT_BYTES // 4
    assert not list((tmp_path / "QUIRE_HOME").glob("**/*.safetensors"))


def test_what_cannot_run_is_told_with_the_card(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("org/deepseek", checkpoint(DEEPSEEK))

    assert quire("show", "org/deepseek") == 0

    shown = capsys.readouterr()
    assert "70,272 bytes a token (one latent vector per layer, MLA)" in shown.out
    assert "'DeepseekV3ForCausalLM' is not supported" in shown.err


def test_a_gguf_file_as_json(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    keys = keys_of({"general.architecture": "llama", "general.license": "mit", "llama.context_length": 2048})
    content = gguf_bytes(keys, [tensor("a", (64, 1024), Q4_0_TENSOR, 0)], bytes(36864))
    hub.add("org/gguf", {"m.Q4_0.gguf": content})

    assert quire("show", "hf.co/org/gguf:Q4_0", "--json") == 0

    card = json.loads(capsys.readouterr().out)
    assert (card["installed"], card["path"], card["size"]) == (False, None, len(content))
    assert (card["details"]["format"], card["details"]["num_parameters"]) == ("gguf", 65_536)
    assert card["memory"]["weight_bytes"] == 36_864


@pytest.mark.parametrize(
    ("name", "words"),
    [("org/absent", "org/absent"), ("no-such-alias", "No model is called no-such-alias"), ("./absent", "no model at")],
)
def test_what_is_nowhere_is_one_sentence(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("show", name) == 1
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_hub_that_is_not_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", unused_endpoint())
    assert quire("show", "org/qwen") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "org/qwen is not installed, and the model hub cannot be reached" in last and "HF_ENDPOINT" in last


def test_offline_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert quire("show", "org/qwen") == 1
    assert "offline" in capsys.readouterr().err
