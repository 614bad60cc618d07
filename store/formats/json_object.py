"""`parse_json_object`: JSON from model files, refused before it can take much memory.

A text of a few MB can become GBs of Python objects, so its values are counted before it is parsed.  Used for
safetensors headers and for the JSON files beside them.
"""

from __future__ import annotations

import json
from typing import Any

from store.formats.limits import MAX_HEADER_BYTES, MAX_JSON_NODES


class NotAnObject(ValueError):
    """The text is no JSON object; the message is the reason, to follow "it" or "its header"."""


def parse_json_object(text: bytes) -> dict[str, Any]:
    """The object in `text`, in which no name may occur twice.  Raises `NotAnObject`."""
    # Each value but the first comes after one of these; within strings they count too, which does no harm.
    if len(text) > MAX_HEADER_BYTES or sum(map(text.count, (b",", b":", b"[", b"{"))) > MAX_JSON_NODES:
        raise NotAnObject("has more values than any model needs")
    try:
        value = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise NotAnObject("is not valid JSON") from error
    if not isinstance(value, dict):
        raise NotAnObject("is not a JSON object")
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries
