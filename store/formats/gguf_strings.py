"""`GgufStrings`: the string arrays of GGUF files, vocabularies above all, kept as bytes.

Made by `store.formats.gguf`; read by the tokenizer of `engine.text`.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from itertools import repeat

STRING_LENGTH = struct.Struct("<Q")


class GgufStrings(Collection[str]):
    """A string array, kept as the bytes that it takes in the file and decoded anew by each iteration.

    A vocabulary takes a tenth of the memory and time that its strings would.  What is not UTF-8 becomes U+FFFD.
    Equal to a list of the same strings.
    """

    __slots__ = ("_chunks", "_count")

    def __init__(self, chunks: tuple[tuple[bytes, int], ...]) -> None:
        """Each chunk is a number of strings, a length and as many bytes each, which the caller has checked."""
        self._chunks = chunks
        self._count = sum(count for _, count in chunks)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        read_length = STRING_LENGTH.unpack_from
        for encoded, count in self._chunks:
            end = 0
            for _ in repeat(None, count):
                start = end + 8
                end = start + read_length(encoded, end)[0]
                yield encoded[start:end].decode("utf-8", "replace")

    def __contains__(self, item: object) -> bool:
        return any(string == item for string in self)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, GgufStrings | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"GgufStrings({list(self)!r})"
