"""Facts of a repository, read through ranges of bytes: the same as of the files, in few and small requests."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from store.errors import BrokenFile, UnsupportedFormat
from store.facts import read_model_facts
from store.names import RepoFile
from store.remote_facts import MAX_SHARD_HEADERS, remote_facts
from tests.fakes.gguf_files import (
    ARRAY,
    F32,
    F32_TENSOR,
    I32,
    Q4_0_TENSOR,
    STRING,
    array,
    gguf_bytes,
    key,
    keys_of,
    safetensors_bytes,
    tensor,
    text,
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "torch_dtype": "bfloat16",
}  # fmt: skip
MEBIBYTE = 1 << 20


class Repository:
    """A directory that is read as if it were far away; `requests` are (file, offset, length)."""

    def __init__(self, folder: Path, *, knows_sizes: bool = True) -> None:
        self.folder = folder
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [(RepoFile(path.relative_to(folder).as_posix()), path) for path in paths]
        self.files = {name: path.stat().st_size if knows_sizes else None for name, path in names}
        self.requests: list[tuple[str, int, int]] = []

    def read(self, file: RepoFile, offset: int, length: int) -> bytes:
        assert 0 < length <= 16 * MEBIBYTE and offset >= 0
        self.requests.append((file, offset, length))
        return (self.folder / file).read_bytes()[offset : offset + length]


def write_checkpoint(folder: Path, num_shards: int) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    for number in range(1, num_shards + 1):
        tensors = {f"layer.{number}": ("BF16", [64, 64], 8192), f"norm.{number}": ("F32", [64], 256)}
        name = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        (folder / name).write_bytes(safetensors_bytes(tensors))


GGUF_METADATA = {
    "general.architecture": "qwen2", "general.license": "apache-2.0", "qwen2.block_count": 28,
    "qwen2.embedding_length": 1536, "qwen2.attention.head_count": 12, "qwen2.attention.head_count_kv": 2,
}  # fmt: skip


def big_vocabulary() -> list[bytes]:
    return [
        array("tokenizer.ggml.tokens", STRING, [f"token {number}" for number in range(150_000)]),
        array("tokenizer.ggml.scores", F32, [0.0] * 150_000),
        array("tokenizer.ggml.token_type", I32, [1] * 150_000),
        key("tokenizer.chat_template", STRING, "{{ x }}"),
    ]


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("knows_sizes", [True, False])
def test_a_checkpoint_far_away_has_the_facts_of_one_here(num_shards: int, knows_sizes: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_shards)
    repository = Repository(tmp_path, knows_sizes=knows_sizes)
    facts = remote_facts(repository.files, None, repository.read)
    assert facts == read_model_facts(tmp_path)
    assert (facts.num_parameters, facts.weight_bytes) == (num_shards * 4160, num_shards * 8448)
    assert (facts.kv_bytes_per_token, facts.dtype, facts.has_chat_template) == (2 * 2 * 2 * 16 * 2, "bfloat16", True)
    assert len(repository.requests) == num_shards + 2


def test_of_very_many_shards_some_are_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3 * MAX_SHARD_HEADERS)
    repository = Repository(tmp_path)
    facts = remote_facts(repository.files, None, repository.read)
    exact = read_model_facts(tmp_path)
    assert facts.num_parameters == pytest.approx(exact.num_parameters, rel=0.05)
    assert facts.weight_bytes == pytest.approx(exact.weight_bytes, rel=0.05)
    asked = {file for file, _, _ in repository.requests if file.endswith(".safetensors")}
    assert len(asked) == MAX_SHARD_HEADERS
    assert {f"model-{number:05d}-of-00072.safetensors" for number in (1, 72)} <= asked


@pytest.mark.parametrize("knows_sizes", [True, False])
def test_a_gguf_file_far_away_has_the_facts_of_one_here(knows_sizes: bool, tmp_path: Path) -> None:
    """A header of 4 MB takes three requests, none of which reaches far into the tensors."""
    keys = [*keys_of(GGUF_METADATA), *big_vocabulary()]
    header = gguf_bytes(keys, [tensor("a", (64, 1 << 20), Q4_0_TENSOR, 0)])
    (tmp_path / "model.gguf").write_bytes(header + bytes(36 * MEBIBYTE))
    repository = Repository(tmp_path, knows_sizes=knows_sizes)
    facts = remote_facts(repository.files, RepoFile("model.gguf"), repository.read)
    assert facts == read_model_facts(tmp_path / "model.gguf")
    assert (facts.kv_bytes_per_token, facts.quantization, facts.license) == (28_672, "Q4_0", "apache-2.0")
    assert facts.has_chat_template
    assert len(repository.requests) <= 3
    assert max(offset + length for _, offset, length in repository.requests) <= len(header) + 4 * MEBIBYTE


def write_parts(folder: Path) -> None:
    for number in range(2):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
        keys = keys_of({**(GGUF_METADATA if number == 0 else {}), **split})
        content = gguf_bytes(keys, [tensor(f"t{number}", (64,), F32_TENSOR, 0)], bytes(256))
        (folder / f"m-{number + 1:05d}-of-00002.gguf").write_bytes(content)


def test_parts_of_a_gguf_model_are_one(tmp_path: Path) -> None:
    (tmp_path / "Q4_0").mkdir()
    write_parts(tmp_path / "Q4_0")
    repository = Repository(tmp_path)
    entry = RepoFile("Q4_0/m-00001-of-00002.gguf")
    facts = remote_facts(repository.files, entry, repository.read)
    assert facts == read_model_facts(tmp_path / entry)
    assert (facts.num_parameters, facts.weight_bytes) == (128, 512)
    del repository.files[RepoFile("Q4_0/m-00002-of-00002.gguf")]
    with pytest.raises(BrokenFile, match="lacks Q4_0/m-00002"):
        remote_facts(repository.files, entry, repository.read)


def test_a_repository_without_a_model_is_refused(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    with pytest.raises(UnsupportedFormat, match=r"no config\.json"):
        remote_facts(repository.files, None, repository.read)
    (tmp_path / "config.json").write_text("{}")
    repository = Repository(tmp_path)
    with pytest.raises(UnsupportedFormat, match="no safetensors"):
        remote_facts(repository.files, None, repository.read)


def test_huge_and_broken_configs_are_not_read_or_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    repository = Repository(tmp_path)
    with pytest.raises(BrokenFile, match="larger than any"):
        remote_facts({**repository.files, RepoFile("config.json"): 1 << 40}, None, repository.read)
    assert repository.requests == []
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(BrokenFile, match=r"config\.json is not valid JSON"):
        remote_facts(Repository(tmp_path).files, None, Repository(tmp_path).read)


def test_a_server_that_gives_less_than_it_promised_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    repository = Repository(tmp_path)

    def cut(file: RepoFile, offset: int, length: int) -> bytes:
        content = repository.read(file, offset, length)
        return content[: max(0, 100 - offset)] if file.endswith(".safetensors") else content

    with pytest.raises(BrokenFile, match="ends within its header"):
        remote_facts(repository.files, None, cut)


def test_a_header_that_never_ends_is_given_up() -> None:
    """A file of a petabyte whose vocabulary goes on and on."""
    fetched_bytes = 0
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("x") + struct.pack("<IIQ", ARRAY, STRING, 1 << 22)
    content = head + text("w" * (MEBIBYTE - 8)) * 65

    def read(file: RepoFile, offset: int, length: int) -> bytes:
        nonlocal fetched_bytes
        piece = content[offset : offset + length]
        fetched_bytes += len(piece)
        return piece

    with pytest.raises(BrokenFile, match="header is longer"):
        remote_facts({RepoFile("m.gguf"): 1 << 50}, RepoFile("m.gguf"), read)
    assert fetched_bytes <= 80 * MEBIBYTE
