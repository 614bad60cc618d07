"""The largest headers that any reader of `store.formats` accepts, and the names that it refuses.

Far above every real model, and low enough that a hostile file costs some tens of MB and about a second.
"""

from __future__ import annotations

import re

MAX_HEADER_BYTES = 64 << 20
"""All of a file before its tensor data.  Vocabularies of 300,000 entries take 15 MB, those of GGUF with merges 20."""

MAX_JSON_NODES = 1 << 20
"""Values of one JSON text; each takes some hundred bytes of memory.  A shard of 20,000 tensors has 200,000."""

MAX_TENSORS = 1 << 18
MAX_KEYS = 1 << 16
MAX_ARRAY_ITEMS = 1 << 22
MAX_ARRAY_DEPTH = 4
MAX_NESTED_ARRAYS = 1 << 12
MAX_DIMENSIONS = 16
MAX_SIZE = (1 << 63) - 1
"""Of one dimension or offset."""

MAX_NAME_BYTES = (1 << 16) - 1
MAX_STRING_BYTES = 1 << 24
"""Chat templates take up to a tenth of a MB."""

MAX_PARTS = 4096
"""Files that one model is split into."""

_UNSAFE_NAME = re.compile(r"[\x00-\x1f\x7f\\]|^/|(?:^|/)\.\.(?:/|$)")


def is_safe_name(name: str) -> bool:
    """Whether a tensor or key may bear this name: no control characters, and no path that leads elsewhere."""
    return not _UNSAFE_NAME.search(name)
