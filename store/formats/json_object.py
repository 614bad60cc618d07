"""`read_json_file`, `parse_json_object` and their kin: JSON of model files, refused before it can take much memory.

A text of a few MB can become GBs of Python objects, so its values are counted before it is parsed.  Used for
safetensors headers and for the JSON files beside them, by `store` and by `engine`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from store.errors import BrokenFile
from store.formats.byte_source import open_local
from store.formats.limits import MAX_HEADER_BYTES, MAX_JSON_NODES

MAX_JSON_FILE_BYTES = 16 << 20
"""Of config.json, tokenizer_config.json and the index of shards; large ones have 10 MB."""


class NotAnObject(ValueError):
    """The text is not the JSON that it should be; the message is the reason, to follow "it" or "its header"."""


def read_json_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file beside the weights.  Raises `BrokenFile`, also if there is no such file."""
    return json_object(path.name, _read(path))


def read_json_array_file(path: Path) -> list[Any]:
    """The JSON array in a file beside the weights; errors as `read_json_file`."""
    try:
        value = _parse(_read(path), unique_names=False)
        if not isinstance(value, list):
            raise NotAnObject("is not a JSON array")
    except NotAnObject as error:
        raise BrokenFile(f"{path.name} {error}; pull the model again, or choose another.") from error
    return value


def _read(path: Path) -> bytes:
    with open_local(path) as source:
        if source.size_bytes > MAX_JSON_FILE_BYTES:
            raise BrokenFile(f"{path.name} is larger than any configuration file; pull the model again.")
        return source.fetch(0, source.size_bytes)


def json_object(name: str, text: bytes) -> dict[str, Any]:
    """The JSON object in the text of the file `name`.  Raises `BrokenFile`."""
    try:
        return parse_json_object(text)
    except NotAnObject as error:
        raise BrokenFile(f"{name} {error}; pull the model again, or choose another.") from error


def parse_json_object(text: bytes, *, unique_names: bool = False) -> dict[str, Any]:
    """The object in `text`; with `unique_names`, none may occur twice in one object.  Raises `NotAnObject`."""
    value = _parse(text, unique_names=unique_names)
    if not isinstance(value, dict):
        raise NotAnObject("is not a JSON object")
    return value


def _parse(text: bytes, *, unique_names: bool) -> Any:
    # Each value but the first comes after one of these; within strings they count too, which does no harm.
    if len(text) > MAX_HEADER_BYTES or sum(map(text.count, (b",", b":", b"[", b"{"))) > MAX_JSON_NODES:
        raise NotAnObject("has more values than any model needs")
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates if unique_names else None)
    except (ValueError, RecursionError) as error:
        raise NotAnObject("is not valid JSON") from error


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries
