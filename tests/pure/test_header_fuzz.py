"""Headers that lie are refused by type, whatever they say: within bounds of memory, of reading and of time.

Files are built of parts that each may lie, or are sound files with damage.  Everything that reads headers is
asked: the readers, the facts of files here and the facts of a repository.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.errors import BrokenFile, UnsupportedFormat
from store.facts import ModelFacts, read_model_facts
from store.formats import limits
from store.formats.gguf import GgufHeader, read_gguf_header
from store.formats.gguf_parts import read_gguf_model
from store.formats.safetensors import read_safetensors_header
from store.names import RepoFile
from store.remote_facts import remote_facts
from tests.fakes.gguf_files import (
    ARRAY,
    F32_TENSOR,
    I32,
    Q4_0_TENSOR,
    STRING,
    U8,
    U32,
    array,
    gguf_bytes,
    key,
    keys_of,
    safetensors_bytes,
    tensor,
    text,
)

FUZZ = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
PEAK_BYTES = 4 << 20

SIZES = st.one_of(st.integers(0, 70), st.sampled_from([1 << 16, 1 << 24, 1 << 32, (1 << 63) - 1, (1 << 64) - 1]))
NAMES = st.one_of(
    st.sampled_from(["token_embd.weight", "../../etc/passwd", "/etc/passwd", "a\x00b", "..", "a\\..\\b", "\x1b[2J"]),
    st.text(max_size=8).filter(lambda name: name.isprintable()),
)
NESTED = st.integers(0, 8).map(lambda depth: struct.pack("<IQ", ARRAY, 1) * depth)


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < PEAK_BYTES


def survives(read: Callable[[], object]) -> None:
    with little_memory(), suppress(BrokenFile, UnsupportedFormat):
        read()


@st.composite
def lying_keys(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(["sound", "string", "array", "strings", "nested", "type"]))
    name = text(draw(NAMES))
    if kind == "sound":
        return key(draw(NAMES), U32, draw(st.integers(0, 99)))
    if kind == "string":
        return name + struct.pack("<IQ", STRING, draw(SIZES)) + draw(st.binary(max_size=16))
    if kind == "array":
        return name + struct.pack("<IIQ", ARRAY, draw(st.integers(0, 13)), draw(SIZES)) + draw(st.binary(max_size=64))
    if kind == "strings":
        head = name + struct.pack("<IIQ", ARRAY, STRING, draw(SIZES))
        return head + b"".join(struct.pack("<Q", length) for length in draw(st.lists(SIZES, max_size=4)))
    if kind == "nested":
        return name + struct.pack("<I", ARRAY) + draw(NESTED)
    return name + struct.pack("<I", draw(st.integers(0, 1 << 32 - 1))) + draw(st.binary(max_size=16))


@st.composite
def lying_ggufs(draw: st.DrawFn) -> bytes:
    """Sound counts often enough for the lies further back to be reached."""
    keys = [key("general.architecture", STRING, "llama"), *draw(st.lists(lying_keys(), max_size=3))]
    rows = [
        tensor(name, tuple(dimensions), draw(st.sampled_from([F32_TENSOR, Q4_0_TENSOR, 4, 99])), offset)
        for name, dimensions, offset in draw(st.lists(st.tuples(NAMES, st.lists(SIZES, max_size=5), SIZES), max_size=3))
    ]
    content = gguf_bytes(keys, rows, draw(st.binary(max_size=256)))
    if draw(st.booleans()):
        counts = struct.pack("<QQ", draw(SIZES), draw(SIZES))
        content = content[:8] + counts + content[24:]
    return content


@FUZZ
@given(content=lying_ggufs())
def test_gguf_headers_that_lie(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    survives(lambda: check_gguf(read_gguf_header(path), len(content)))
    survives(lambda: check_facts(read_model_facts(path)))
    survives(lambda: check_facts(far_away({"m.gguf": content}, "m.gguf")))


def check_gguf(header: GgufHeader, num_bytes: int) -> None:
    ends = [entry.offset + entry.num_bytes for entry in header.tensors.values()]
    assert max(ends, default=0) <= num_bytes
    assert all(limits.is_safe_name(name) for name in (*header.tensors, *header.metadata))


def check_facts(facts: ModelFacts) -> None:
    for shown in (facts.architecture, facts.quantization, facts.license or "", facts.dtype or ""):
        assert shown.isprintable() and ".." not in shown and "/" not in shown
    assert facts.num_parameters >= 0


def far_away(files: dict[str, bytes], entry: str | None, *, claimed: dict[str, int | None] | None = None) -> ModelFacts:
    """Facts through ranges; `claimed` are sizes that the repository lists, which may be lies."""
    budget_bytes = 2 * limits.MAX_HEADER_BYTES

    def read(file: RepoFile, offset: int, length: int) -> bytes:
        nonlocal budget_bytes
        piece = files[file][offset : offset + length]
        budget_bytes -= len(piece)
        assert budget_bytes > 0 and length > 0
        return piece

    sizes = {RepoFile(name): len(content) for name, content in files.items()}
    listed = {RepoFile(name): size for name, size in (claimed or {}).items()}
    return remote_facts({**sizes, **listed}, RepoFile(entry) if entry else None, read)


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), SIZES),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)


@st.composite
def lying_entries(draw: st.DrawFn) -> Any:
    if draw(st.integers(0, 4)) == 0:
        return draw(JSON_VALUES)
    begin = draw(SIZES)
    return {
        "dtype": draw(st.one_of(st.sampled_from(["F32", "BF16", "F4", "I64"]), JSON_VALUES)),
        "shape": draw(st.one_of(st.lists(SIZES, max_size=20), JSON_VALUES)),
        "data_offsets": draw(st.one_of(st.just([begin, begin + draw(st.integers(0, 64))]), JSON_VALUES)),
    }


@st.composite
def lying_safetensors(draw: st.DrawFn) -> bytes:
    entries = draw(st.dictionaries(NAMES, lying_entries(), max_size=4))
    header = draw(st.one_of(st.just(json.dumps(entries).encode()), st.binary(max_size=32)))
    length = draw(st.one_of(st.just(len(header)), SIZES))
    return struct.pack("<Q", length) + header + draw(st.binary(max_size=256))


@FUZZ
@given(content=lying_safetensors(), config=JSON_VALUES)
def test_safetensors_headers_that_lie(content: bytes, config: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    config_text = json.dumps(config).encode()
    (tmp_path / "config.json").write_bytes(config_text)

    def read() -> None:
        tensors = read_safetensors_header(tmp_path / "model.safetensors")
        assert all(entry.offset + entry.num_bytes <= len(content) for entry in tensors.values())
        assert all(limits.is_safe_name(name) for name in tensors)

    survives(read)
    survives(lambda: check_facts(read_model_facts(tmp_path)))
    survives(lambda: check_facts(far_away({"model.safetensors": content, "config.json": config_text}, None)))


SOUND_GGUF = gguf_bytes(
    [
        *keys_of({"general.architecture": "qwen2", "general.license": "mit", "qwen2.block_count": 2}),
        array("tokenizer.ggml.tokens", STRING, [f"token {number}" for number in range(40)]),
        array("tokenizer.ggml.token_type", I32, [1] * 40),
        array("qwen2.attention.head_count_kv", U8, [2, 2]),
    ],
    [tensor("a", (64, 2), Q4_0_TENSOR, 0), tensor("b", (3,), F32_TENSOR, 96)],
    bytes(108),
)
SOUND_SAFETENSORS = safetensors_bytes({"a": ("BF16", [8, 8], 128), "b": ("F32", [8], 32)})
SOUND_CONFIG = json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8}).encode()


@st.composite
def damaged(draw: st.DrawFn, sound: bytes) -> bytes:
    """Overwritten here and there, often with the bytes of huge numbers, then cut or extended."""
    content = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(content) - 1))
        patch = draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, b"9" * 30])))
        content[position : position + draw(st.integers(0, len(patch)))] = patch
    return bytes(content[: draw(st.integers(0, len(content)))]) + draw(st.sampled_from([b"", bytes(64)]))


@FUZZ
@given(gguf=damaged(SOUND_GGUF), size=st.one_of(st.none(), SIZES))
def test_damaged_gguf_files(gguf: bytes, size: int | None, tmp_path: Path) -> None:
    """Also where the repository lists another size than the file has."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf)
    survives(lambda: check_gguf(read_gguf_model(path).header, len(gguf)))
    survives(lambda: check_facts(read_model_facts(path)))
    survives(lambda: check_facts(far_away({"m.gguf": gguf}, "m.gguf", claimed={"m.gguf": size})))


@FUZZ
@given(weights=damaged(SOUND_SAFETENSORS), config=damaged(SOUND_CONFIG), size=st.one_of(st.none(), SIZES))
def test_damaged_checkpoints(weights: bytes, config: bytes, size: int | None, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "config.json").write_bytes(config)
    survives(lambda: check_facts(read_model_facts(tmp_path)))
    files = {"model.safetensors": weights, "config.json": config}
    survives(lambda: check_facts(far_away(files, None, claimed={"model.safetensors": size})))


@FUZZ
@given(first=damaged(SOUND_GGUF), second=damaged(SOUND_GGUF))
def test_parts_that_do_not_belong_together(first: bytes, second: bytes, tmp_path: Path) -> None:
    names = [f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for name, content in zip(names, (first, second), strict=True):
        (tmp_path / name).write_bytes(content)
    survives(lambda: read_model_facts(tmp_path / names[0]))
    survives(lambda: far_away({names[0]: first, names[1]: second}, names[0]))


def test_json_that_would_become_gigabytes_is_not_parsed(tmp_path: Path) -> None:
    """Three million lists in a header of 6 MB would take 170 MB."""
    header = b'{"a":[' + b"[]," * 3_000_000 + b"0]}"
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    tracemalloc.start()
    try:
        survived = False
        try:
            read_safetensors_header(path)
        except BrokenFile:
            survived = True
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert survived and peak_bytes < 4 * len(header)
