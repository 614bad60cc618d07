"""`quire search` and `quire recommend` as a person sees them, with the hub stand-in over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.recommend import parse_memory
from app.residency.arithmetic.memory import DeviceMemory
from store.models import ModelStore
from store.paths import DataRoot
from tests.fakes.command_here import quire
from tests.fakes.hub import FakeHub, unused_endpoint
from tests.fakes.installed import install

GIB = 2**30
QWEN = {
    "id": "someone/Qwen-Tuned",
    "downloads": 50,
    "tags": ["safetensors", "license:mit"],
    "config": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "safetensors": {"total": 8_000_000_000, "parameters": {"BF16": 8_000_000_000}},
}
MIXTRAL = {"id": "other/qwen-moe", "downloads": 9000, "tags": ["safetensors"], "config": {"model_type": "qwen3_moe"}}
GGUF = {"id": "g/qwen-GGUF", "downloads": 7, "tags": ["gguf"], "gguf": {"total": 600_000_000, "architecture": "qwen3"}}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.search_results = [QWEN, MIXTRAL, GGUF]
        yield hub


@pytest.fixture(autouse=True)
def _own_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: FakeHub) -> None:
    for name in ("QUIRE_CONFIG_DIR", "QUIRE_STATE_DIR", "QUIRE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    for name in ("QUIRE_DEBUG", "HF_HUB_OFFLINE", "HF_TOKEN", "QUIRE_MAX_NUM_SEQS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory("cpu", 16 * GIB, 2 * GIB)
    monkeypatch.setattr("app.residency.devices.measure", lambda _device: memory)


def rows_of(text: str) -> dict[str, list[str]]:
    return {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}


def test_the_catalogue_comes_before_the_hub(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("search", "QWEN") == 0

    shown = capsys.readouterr().out
    rows = rows_of(shown)
    assert shown.index("qwen3:8b") < shown.index(f"On the hub ({hub.endpoint}):") < shown.index("other/qwen-moe")
    assert rows["qwen3:8b"][:5] == ["8.2B", "16.4", "GB", "chat", "yes"]
    assert "qwen3:8b-q4_k_m" not in rows
    assert rows["other/qwen-moe"] == ["-", "-", "9,000", "no"]
    assert rows["someone/Qwen-Tuned"] == ["8.0B", "16.0", "GB", "50", "yes"]
    assert rows["g/qwen-GGUF"] == ["600M", "GGUF", "7", "yes"]
    assert list(rows).index("other/qwen-moe") < list(rows).index("someone/Qwen-Tuned") < list(rows).index("g/qwen-GGUF")
    assert hub.searches[0]["search"] == ["QWEN"] and hub.searches[0]["sort"] == ["downloads"]


def test_what_is_installed_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An alias may be here under its repository's name, and a repository as one of its files."""
    store = ModelStore(DataRoot.open(tmp_path / "QUIRE_HOME"))
    install(store, "qwen3:1.7b", "Qwen/Qwen3-1.7B", {"model.gguf": b"1"}, entry="model.gguf")
    install(store, "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", {"model.gguf": b"2"}, entry="model.gguf")
    install(store, "g/qwen-GGUF:Q4_0", "g/qwen-GGUF", {"model.gguf": b"3"}, entry="model.gguf")

    assert quire("search", "qwen") == 0

    rows = rows_of(capsys.readouterr().out)
    assert {name for name, cells in rows.items() if "installed" in cells} == {
        "qwen3:0.6b", "qwen3:1.7b", "g/qwen-GGUF",
    }  # fmt: skip


def test_a_quantised_variant_is_found_by_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("search", "--offline", "llama", "3.2", "q4_k_m") == 0
    assert list(rows_of(capsys.readouterr().out)) == ["NAME", "llama3.2:1b-q4_k_m", "llama3.2:3b-q4_k_m"]


def test_offline_asks_nobody_and_says_so(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("search", "gemma", "--offline") == 0
    shown = capsys.readouterr()
    assert "Offline: only the catalogue was searched" in shown.err
    assert "gemma2:2b, gemma2:9b, gemma2:27b: The architecture 'gemma2' is not supported." in shown.err
    assert hub.requests == []


def test_a_hub_that_is_not_there_leaves_the_catalogue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", unused_endpoint())
    assert quire("search", "qwen3") == 0
    shown = capsys.readouterr()
    assert "qwen3:8b" in shown.out
    assert "Only the catalogue was searched: the model hub cannot be reached" in shown.err


def test_a_mirror_answers_for_a_hub_that_is_not_there(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", unused_endpoint())
    monkeypatch.setenv("QUIRE_HUB_MIRRORS", hub.endpoint)
    assert quire("search", "tuned") == 0
    assert f"On the hub ({hub.endpoint}):" in capsys.readouterr().out


def test_a_mirror_that_knows_no_details_is_asked_without(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.faults.api_statuses = [400]
    hub.search_results = [{"modelId": "plain/thing", "id": "plain/thing"}]
    assert quire("search", "thing") == 0
    assert rows_of(capsys.readouterr().out)["plain/thing"] == ["-", "-", "-", "-"]
    assert ["expand" in search for search in hub.searches] == [True, False]


@pytest.mark.parametrize("body", [b"{}", b"[1]", b"[" * 100_000, b"not json", b'[{"id": 5}]'])
def test_an_answer_that_is_none_is_one_sentence(hub: FakeHub, capsys: pytest.CaptureFixture[str], body: bytes) -> None:
    hub.faults.api_body = body
    assert quire("search", "qwen3") == 0
    assert "gave no usable answer to a search" in capsys.readouterr().err


def test_what_a_hub_says_is_not_believed(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.search_results = [
        {"id": "../../thing"},
        {"id": "pypi:thing"},
        {"id": "a/thing-pickle", "tags": ["pytorch"]},
        {"id": "a/thing", "downloads": -1, "tags": "x", "config": [], "safetensors": {"parameters": {"BF16": "many"}}},
        {"id": "b/thing", "downloads": 10**30, "config": {"model_type": "\x1b[2J", "architectures": [5]}},
    ]
    assert quire("search", "thing", "--json") == 0
    found = json.loads(capsys.readouterr().out)["hub"]
    assert [model["repo"] for model in found] == ["a/thing", "b/thing"]
    assert all(model[key] is None for model in found for key in ("downloads", "size", "architecture", "runs"))


def test_search_as_json(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("search", "mistral", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["endpoint"], found["problem"], found["hub"]) == (hub.endpoint, None, [])
    first = found["catalog"][0]
    assert (first["name"], first["license"], first["installed"]) == ("mistral:7b", "apache-2.0", False)
    assert first["why_not"].startswith("The architecture 'mistral' is not supported")


def test_nothing_found_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("search", "zzzz") == 1
    assert "Nothing is called zzzz" in capsys.readouterr().err
    assert quire("search", " ") == 2


def test_an_alias_of_a_family_that_does_not_run_is_known_all_the_same(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    header = b'{"w":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}}'
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    weights = len(header).to_bytes(8, "little") + header + bytes(16)
    files = {"config.json": json.dumps(config).encode(), "tokenizer.json": b"{}", "model.safetensors": weights}
    hub.add("mistralai/Mistral-7B-Instruct-v0.3", files)
    assert quire("show", "mistral") == 0
    assert "The architecture 'MistralForCausalLM' is not supported" in capsys.readouterr().err


def test_recommend_shows_its_arithmetic(ram: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("recommend") == 0
    shown = capsys.readouterr()
    cells = rows_of(shown.out)["qwen3:8b-q4_k_m"]
    assert cells[:8] == ["5.0", "GB", "1.2", "GB", "430", "MB", "6.7", "GB"]
    assert shown.out.splitlines()[-1] == "Best: quire run qwen3:8b-q4_k_m"
    assert "RAM has 17.2 GB: Quire may take 15.8 GB of it" in shown.err
    assert "36 layers x 8 heads x 128 x 2 bytes for each of 8,192 tokens" in shown.err
    assert "left out: gemma2, gemma3, mistral" in shown.err


def test_recommend_tells_what_is_free_now(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    memory = DeviceMemory("cuda:0", 24 * GIB, 8 * GIB)
    monkeypatch.setattr("app.residency.devices.measure", lambda _device: memory)
    assert quire("recommend") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == "Best: quire run qwen3:8b"
    assert "only 15.1 GB of that is free; `quire run qwen3:4b-instruct-2507` fits in that" in shown.err


def test_recommend_for_another_machine(ram: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("recommend", "--memory", "8GiB", "--device", "cuda", "--for", "code", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["total"]) == ("cuda:0", 8 * GIB)
    assert [model["command"] for model in found["models"]] == [
        "quire run qwen2.5-coder:1.5b", "quire run qwen2.5-coder:0.5b",
    ]  # fmt: skip
    assert quire("recommend", "--memory", "8GiB", "--device", "cuda") == 0
    assert "With `max_num_seqs = 16`, enough for one person, qwen2.5:3b fits too." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--for", "embed", "--memory", "100MB"), 1, "`quire search embed` shows them all."),
        (("--for", "rerank"), 0, "the cache is 2 (keys and values)"),
        (("--memory", "100MB"), 1, "No chat model of the catalogue fits in that"),
        (("--memory", "much"), 2, "'much' is not a size of memory; write it like 24GiB."),
        (("--device", "cuda"), 1, "This machine has no GPU"),
    ],
)
def test_recommend_has_a_sentence_for_everything(
    ram: None, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    assert quire("recommend", *arguments) == code
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_run_without_a_model_names_two(ram: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "`quire run starter`" in line and "`quire run qwen3:8b-q4_k_m`" in line


@pytest.mark.parametrize(
    ("text", "expected"), [("24", 24 * GIB), ("24GiB", 24 * GIB), ("1.5 gb", 1_500_000_000), ("512M", 512 * 2**20)]
)
def test_sizes_of_memory(text: str, expected: int) -> None:
    assert parse_memory(text) == expected
