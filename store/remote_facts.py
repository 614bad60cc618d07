"""`remote_facts`: what a model is, before any of its weights are here.

Reads config.json and the headers of the weight files through a callable that fetches ranges of bytes, in few
requests.  Knows nothing of networks; called by `pull` with its downloader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from store.errors import BrokenFile, UnsupportedFormat
from store.facts import (
    CHAT_TEMPLATE_FILES,
    LONGEST_FACT_ARRAY,
    ModelFacts,
    facts_of_checkpoint,
    facts_of_gguf,
)
from store.formats.byte_source import RangedBytes
from store.formats.gguf import GgufHeader, parse_gguf_header
from store.formats.gguf_parts import join_gguf_parts
from store.formats.json_object import MAX_JSON_FILE_BYTES, json_object
from store.formats.part_names import part_names
from store.formats.safetensors import SafetensorsTensor, parse_safetensors_header
from store.names import RepoFile

ReadRange = Callable[[RepoFile, int, int], bytes]
"""(file, offset, length) -> bytes, fewer than asked for only where the file ends; raises a StoreError."""

MAX_SHARD_HEADERS = 24
"""Shards whose headers are read.  A larger model is judged by as many of its shards, and by the sizes of all."""

_SHARD_WINDOW_BYTES = 64 << 10
_CONFIG = RepoFile("config.json")
_TOKENIZER_CONFIG = RepoFile("tokenizer_config.json")


def remote_facts(files: Mapping[RepoFile, int | None], entry: RepoFile | None, read: ReadRange) -> ModelFacts:
    """Facts of the model that consists of `files` (sizes in bytes, where known).

    `entry` is the GGUF file to open, the first part of one that is split; None means config.json and safetensors.
    `num_parameters` of a checkpoint of more than `MAX_SHARD_HEADERS` shards is an estimate.  Raises BrokenFile,
    UnsupportedFormat, and what `read` raises.
    """
    if entry is not None:
        return _gguf_facts(files, entry, read)
    config = json_object(_CONFIG, _read_text(files, _CONFIG, read))
    shards = sorted(file for file in files if file.endswith(".safetensors"))
    if not shards:
        raise UnsupportedFormat("The repository holds no safetensors weights; choose another repository.")
    chosen = _spread(shards, MAX_SHARD_HEADERS) if all(files[file] for file in shards) else shards
    tensors = [tensor for file in chosen for tensor in _shard_tensors(files, file, read)]
    has_template = any(name in files for name in CHAT_TEMPLATE_FILES)
    if not has_template and _TOKENIZER_CONFIG in files:
        tokenizer_config = json_object(_TOKENIZER_CONFIG, _read_text(files, _TOKENIZER_CONFIG, read))
        has_template = bool(tokenizer_config.get("chat_template"))
    facts = facts_of_checkpoint(config, [(tensor.dtype, tensor) for tensor in tensors], has_chat_template=has_template)
    return facts if len(chosen) == len(shards) else _scaled(facts, sum(files[file] or 0 for file in shards))


def _gguf_facts(files: Mapping[RepoFile, int | None], entry: RepoFile, read: ReadRange) -> ModelFacts:
    names = [RepoFile(name) for name in part_names(entry)]
    headers: list[GgufHeader] = []
    for name in names:
        if name not in files:
            raise BrokenFile(f"The repository lacks {name}, a part of {entry}; choose another file or repository.")
        source = RangedBytes(name, files[name], partial(read, name))
        headers.append(parse_gguf_header(source, longest_array=LONGEST_FACT_ARRAY))
    return facts_of_gguf(entry, join_gguf_parts(names, headers))


def _shard_tensors(files: Mapping[RepoFile, int | None], file: RepoFile, read: ReadRange) -> list[SafetensorsTensor]:
    source = RangedBytes(file, files[file], partial(read, file), first_window_bytes=_SHARD_WINDOW_BYTES)
    return list(parse_safetensors_header(source).values())


def _read_text(files: Mapping[RepoFile, int | None], file: RepoFile, read: ReadRange) -> bytes:
    """All of a small file."""
    if file not in files:
        raise UnsupportedFormat(f"The repository holds no {file}; choose another repository.")
    size_bytes = files[file]
    if size_bytes is not None and size_bytes > MAX_JSON_FILE_BYTES:
        raise BrokenFile(f"{file} is larger than any configuration file; choose another repository.")
    return b"" if size_bytes == 0 else read(file, 0, size_bytes or MAX_JSON_FILE_BYTES)


def _spread(shards: Sequence[RepoFile], count: int) -> list[RepoFile]:
    """At most `count` of the shards, the first and the last among them: those hold what layers do not repeat."""
    if len(shards) <= count:
        return list(shards)
    return [shards[index * (len(shards) - 1) // (count - 1)] for index in range(count)]


def _scaled(facts: ModelFacts, total_bytes: int) -> ModelFacts:
    """The facts of some shards, for all of them: parameters are spread as the bytes are."""
    num_parameters = facts.num_parameters * total_bytes // max(1, facts.weight_bytes)
    return msgspec.structs.replace(facts, num_parameters=num_parameters, weight_bytes=total_bytes)
