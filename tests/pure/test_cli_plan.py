"""`quire plan` as a person sees it: of the catalogue, a bare config.json, an installed model and one on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.residency.arithmetic.memory import DeviceMemory
from store.models import ModelStore
from store.paths import DataRoot
from tests.fakes.command_here import quire
from tests.fakes.hub import FakeHub
from tests.fakes.installed import install
from tests.fakes.tiny_embedder import MAX_LENGTH, write_tiny_embedder
from tests.pure.test_cli_show import CONFIG, WEIGHT_BYTES, checkpoint
from tests.pure.test_parameter_estimate import DEEPSEEK_V3, GPT2

GIB = 2**30


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture(autouse=True)
def _own_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: FakeHub) -> None:
    for name in ("QUIRE_CONFIG_DIR", "QUIRE_STATE_DIR", "QUIRE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("QUIRE_DEBUG", "HF_HUB_OFFLINE", "HF_TOKEN", "QUIRE_MAX_NUM_SEQS", "QUIRE_MAX_MODEL_LEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("app.residency.devices.measure", lambda _device: DeviceMemory("cpu", 16 * GIB, 0))


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert quire("plan", *arguments, "--json") == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_r1_distill_of_the_catalogue(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("plan", "deepseek-r1:1.5b", "--memory", "24GiB", "--utilization", "0.9", "--blocks", "26653")
    assert quire(*command) == 0
    shown = capsys.readouterr().out
    assert "The GPU cuda:0 of 25.8 GB; models may have 23.7 GB of it (memory_limit 0.92)." in shown
    assert "28,672 bytes = 2 (keys and values) x 28 layers x 2 KV heads x 128 x 2 bytes" in shown
    assert "458,752 bytes for 16 tokens" in shown
    assert "26,653 blocks = 426,448 tokens" in shown
    assert "3.25x for 131,072 tokens per request" in shown
    assert hub.requests == [], "nobody is asked"


def test_the_table_and_the_picture_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("plan", "qwen3:4b=0.65", "--with", "qwen3-embedding:0.6b=0.25", "--memory", "24GiB") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {words[0]: words[1:] for line in lines if (words := line.split())}
    assert rows["MODEL"][0] == "SHARE" and rows["free"][0] == "0.10"
    bars = [line for line in lines if line.endswith("]")]
    assert [bar.split()[0] for bar in bars] == ["qwen3:4b", "qwen3-embedding:0.6b"]
    assert all(len(bar) == 80 for bar in bars)


def test_a_bare_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "v3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**DEEPSEEK_V3, "torch_dtype": "bfloat16"}))
    for path in (folder, folder / "config.json"):
        found = planned(capsys, str(path), "--memory", "80GiB", code=1)
        assert found["models"][0]["name"] == "v3"
        assert found["models"][0]["kv_cache"]["bytes_per_token"] == 70_272
        assert "(MLA)" in found["notes"][0]
        assert not found["fits"]


def test_gpt2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    found = planned(capsys, str(tmp_path), "--memory", "23.62GiB", "--max-model-len", "512", "--blocks", "32958")
    model = found["models"][0]
    assert (model["kv_cache"]["tokens"], model["max_concurrency"]) == (527_328, 1029.94)
    assert round(model["kv_cache"]["bytes"] / GIB, 2) == 18.10


def test_an_installed_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = ModelStore(DataRoot.open(tmp_path / "QUIRE_HOME"))
    install(store, "mine", "org/mine", checkpoint(CONFIG))
    found = planned(capsys, "mine", "--memory", "8GiB", "--max-num-seqs", "8")
    assert found["models"][0]["weights"] == WEIGHT_BYTES
    assert found["models"][0]["kv_cache"]["bytes_per_token"] == 28_672


def test_a_model_on_the_hub_by_its_headers(hub: FakeHub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hub.add("org/qwen", checkpoint(CONFIG))
    found = planned(capsys, "org/qwen", "--memory", "8GiB")
    assert found["models"][0]["weights"] == WEIGHT_BYTES
    assert hub.sent_bytes < WEIGHT_BYTES // 4
    assert not list((tmp_path / "QUIRE_HOME").glob("**/*.safetensors"))


def test_this_machines_memory(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "tinyllama")
    assert (found["device"]["name"], found["device"]["total"]) == ("cpu", 16 * GIB)
    assert "it is 22,528 bytes" in found["notes"][0]
    assert planned(capsys, "tinyllama", "--memory", "8GiB")["models"][0]["kv_cache"]["bytes_per_token"] == 22_528
    assert planned(capsys, "tinyllama", "--kv-cache-dtype", "fp8")["models"][0]["kv_cache"]["bytes_per_token"] == 11_264


def test_what_does_not_fit_ends_with_an_error_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("plan", "qwen3:32b", "--memory", "24GiB") == 1
    shown = capsys.readouterr().out
    assert "no room" in shown
    assert "qwen3:32b needs at least" in shown and "A GPU of 80 GiB would hold it." in shown


def test_a_share_beyond_the_limit_is_planned_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("plan", "qwen3:4b", "--memory", "24GiB", "--utilization", "0.95") == 0
    assert "The setting is 0.92: raise memory_limit, or the daemon refuses the share." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("qwen3:4b", "--utilization", "1.5"), 2, "1.5 is no share of the memory"),
        (("qwen3:4b", "--block-size", "24"), 2, "16, 32 or 64 tokens, not 24"),
        (("qwen3:4b", "--memory", "many"), 2, "'many' is not a size of memory"),
        (("qwen3:4b", "--device", "cuda"), 1, "no GPU that can be used; name its memory"),
        (("qwen3:4b=2",), 1, "its share is 2; give a fraction"),
        (("./nowhere/model.gguf",), 1, "nowhere"),
    ],
)
def test_a_sentence_for_everything(
    arguments: tuple[str, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire("plan", *arguments) == code
    shown = capsys.readouterr()
    assert words in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""


def test_shares_that_add_up_to_too_much_are_told_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("plan", "qwen3:8b=0.65", "--with", "qwen3:4b=0.4", "--memory", "96GiB") == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == (
        "The shares come to 1.05, above the 0.92 that models may have; give qwen3:8b at most 0.52."
    )


def test_an_embedding_model_has_the_context_that_its_files_give_texts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_tiny_embedder(tmp_path / "embedder")
    assert planned(capsys, str(folder))["models"][0]["max_model_len"] == MAX_LENGTH
