"""What the daemon does with models that it cannot run: refused before the download, or when they are opened."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.daemon import FakeDaemon, running_daemon
from tests.fakes.gguf_files import ARRAY, F32_TENSOR, STRING, gguf_bytes, key, keys_of, tensor, text
from tests.fakes.hub import FakeHub
from tests.fakes.tiny_model import write_tiny_model

NAME = "org/tiny"
MEMORY_BYTES = 200_000_000


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture
def daemon(tmp_path: Path, hub: FakeHub) -> Iterator[FakeDaemon]:
    memory = {"QUIRE_TEST_MEMORY_BYTES": str(MEMORY_BYTES)}
    with running_daemon(tmp_path / "daemon", HF_ENDPOINT=hub.endpoint, **memory) as daemon:
        yield daemon


@pytest.fixture
async def http(daemon: FakeDaemon) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=30) as client:
        yield client


def add_model(hub: FakeHub, tmp_path: Path, *, tensor_bytes: int = 8, **config: Any) -> None:
    """The tiny model under NAME, with other facts; of large weights only the header is sound."""
    model = write_tiny_model(tmp_path / "source")
    stored = json.loads((model / "config.json").read_text())
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    files["config.json"] = json.dumps({**stored, **config}).encode()
    entry = {"dtype": "F32", "shape": [tensor_bytes // 4], "data_offsets": [0, tensor_bytes]}
    header = json.dumps({"weight": entry}).encode()
    files["model.safetensors"] = struct.pack("<Q", len(header)) + header + bytes(tensor_bytes)
    hub.add(NAME, files)


async def pull(http: httpx.AsyncClient, **options: Any) -> list[dict[str, Any]]:
    response = await http.post("/api/pull", json={"model": NAME, **options})
    return [json.loads(line) for line in response.text.splitlines()]


async def test_an_architecture_that_is_not_supported_is_refused_before_its_weights(
    http: httpx.AsyncClient, hub: FakeHub, tmp_path: Path
) -> None:
    add_model(hub, tmp_path, tensor_bytes=4_000_000, architectures=["GemmaForCausalLM"], model_type="gemma")

    error = (await pull(http))[-1]["error"]

    assert error["code"] == "unsupported_model_format"
    assert "'GemmaForCausalLM' is not supported" in error["message"]
    assert hub.sent_bytes < 1_000_000
    assert (await pull(http, force=True))[-1] == {"status": "success"}


async def test_weights_that_this_device_cannot_hold_are_refused(
    http: httpx.AsyncClient, hub: FakeHub, tmp_path: Path
) -> None:
    add_model(hub, tmp_path, tensor_bytes=MEMORY_BYTES + 4_000_000)

    error = (await pull(http))[-1]["error"]

    assert error["code"] == "insufficient_memory"
    assert "weights alone take 204 MB and cpu has 200 MB" in error["message"]
    assert hub.sent_bytes < 1_000_000


async def test_a_context_that_will_be_short_is_told(hub: FakeHub, tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 128}
    add_model(hub, tmp_path, **sizes)
    memory = {"QUIRE_TEST_MEMORY_BYTES": str(5 * MEMORY_BYTES)}

    with running_daemon(tmp_path / "roomy", HF_ENDPOINT=hub.endpoint, **memory) as daemon:
        async with httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=30) as http:
            lines = await pull(http)

    assert lines[-1] == {"status": "success"}
    told = [line["status"] for line in lines if "whole context" in line["status"]]
    assert len(told) == 1 and "and cpu has 1.0 GB; the model will run with a context of about" in told[0]


async def test_a_model_that_may_not_start_is_told(http: httpx.AsyncClient, hub: FakeHub, tmp_path: Path) -> None:
    add_model(hub, tmp_path)

    lines = await pull(http)

    assert lines[-1] == {"status": "success"}
    told = [line["status"] for line in lines]
    assert any("it may not start, so choose a smaller model." in status for status in told), told


async def test_a_gguf_model_in_parts_is_pulled_and_shown_whole(http: httpx.AsyncClient, hub: FakeHub) -> None:
    files = {}
    for number in range(2):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
        keys = keys_of({**({"general.architecture": "llama"} if number == 0 else {}), **split})
        content = gguf_bytes(keys, [tensor(f"t{number}", (64,), F32_TENSOR, 0)], bytes(256))
        files[f"Q8_0/m-{number + 1:05d}-of-00002.gguf"] = content
    hub.add(NAME, files)

    assert (await pull(http))[-1] == {"status": "success"}

    card = (await http.post("/api/show", json={"model": NAME})).json()
    assert (card["details"]["num_parameters"], card["details"]["format"]) == (128, "gguf")
    assert card["memory"]["weight_bytes"] == 512
    assert card["size"] == sum(map(len, files.values()))


SOUND = gguf_bytes(
    keys_of({"general.architecture": "llama", "llama.block_count": 1}), [tensor("a", (8,), F32_TENSOR, 0)], bytes(32)
)
HUGE = struct.pack("<Q", 1 << 62)
BROKEN_GGUF: dict[str, bytes] = {
    "empty": b"",
    "letters": b"GGUF",
    "noise": bytes(range(256)) * 64,
    "truncated": SOUND[:-1],
    "many_tensors": SOUND[:8] + HUGE + SOUND[16:],
    "long_string": gguf_bytes([text("general.architecture") + struct.pack("<I", STRING) + HUGE], [], bytes(64)),
    "long_array": gguf_bytes([text("x") + struct.pack("<II", ARRAY, STRING) + HUGE], [], bytes(64)),
    "overlap": gguf_bytes(
        keys_of({"general.architecture": "llama"}),
        [tensor("a", (16,), F32_TENSOR, 0), tensor("b", (16,), F32_TENSOR, 32)],
        bytes(128),
    ),
    "traversal": gguf_bytes([key("general.architecture", STRING, "../../evil")], [], bytes(64)),
    "nul": gguf_bytes([key("general.architecture", STRING, "lla\x00ma")], [], bytes(64)),
}
BROKEN_CONFIG = {"deep": b"[" * 100_000, "cut": b'{"model_type": "llama"', "list": b"[]", "bytes": b"\xff\xfe\x00"}


def write_broken(folder: Path) -> list[Path]:
    folder.mkdir()
    models = []
    for name, content in BROKEN_GGUF.items():
        models.append(folder / f"{name}.gguf")
        models[-1].write_bytes(content)
    for name, content in BROKEN_CONFIG.items():
        models.append(write_tiny_model(folder / f"config-{name}"))
        (models[-1] / "config.json").write_bytes(content)
    models.append(write_tiny_model(folder / "weights"))
    (models[-1] / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    models.append(write_tiny_model(folder / "tokenizer"))
    (models[-1] / "tokenizer.json").write_bytes(b"[" * 100_000)
    return models


async def test_broken_files_are_answered_and_take_nothing_down(tmp_path: Path) -> None:
    sound = write_tiny_model(tmp_path / "sound")
    with running_daemon(tmp_path / "daemon") as daemon:
        async with httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=30) as http:
            for model in write_broken(tmp_path / "broken"):
                body = {"model": str(model), "messages": [{"role": "user", "content": "hello"}]}
                shown = await http.post("/api/show", json={"model": str(model)})
                asked = await http.post("/v1/chat/completions", json=body)
                expected = 200 if model.name == "tokenizer" else 422  # showing a model reads no tokenizer
                assert (shown.status_code, asked.status_code) == (expected, 422), model
                assert asked.json()["error"]["message"].count("\n") == 0

            body = {"model": str(sound), "messages": [{"role": "user", "content": "hello"}]}
            answer = await http.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "hello"
        assert daemon.process.poll() is None
        assert "Traceback" not in daemon.log_text()
