"""`ByteSource`: the bytes of one model file by position, whether it lies here or on a server.

The header readers of `store.formats` pull windows out of it, so that neither needs the whole file.  A file
here is read, not mapped: a map of a file that another program cuts short, or of a bad disk, ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from os import SEEK_END
from pathlib import Path
from typing import Protocol

from store.errors import BrokenFile

_LOCAL_WINDOW_BYTES = 32 << 10
_FIRST_RANGE_BYTES = 1 << 20
_LARGEST_RANGE_BYTES = 16 << 20


class ByteSource(Protocol):
    """`size_bytes` is that of the whole file, None if nobody knows; `remedy` ends a message about a broken file."""

    @property
    def name(self) -> str: ...

    @property
    def size_bytes(self) -> int | None: ...

    @property
    def remedy(self) -> str: ...

    def fetch(self, offset: int, num_bytes: int) -> bytes:
        """Bytes from `offset` on, `num_bytes` or as many more as come cheaply; fewer only where the file ends."""
        ...


class LocalBytes:
    """An open file of this machine."""

    remedy = "remove it and pull the model again"

    def __init__(self, file: FileIO, name: str) -> None:
        self._file = file
        self.name = name
        self.size_bytes: int = file.seek(0, SEEK_END)

    def fetch(self, offset: int, num_bytes: int) -> bytes:
        self._file.seek(offset)
        wanted = max(num_bytes, _LOCAL_WINDOW_BYTES)
        first = self._file.read(wanted)
        if len(first) >= num_bytes:
            return first
        pieces, missing = [first], num_bytes - len(first)
        while missing > 0 and (piece := self._file.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)


@contextmanager
def open_local(path: Path) -> Iterator[LocalBytes]:
    """Raises `BrokenFile` for a file that cannot be read, then or later."""
    try:
        with FileIO(path) as file:
            yield LocalBytes(file, path.name)
    except OSError as error:
        raise BrokenFile(
            f"{path.name} cannot be read ({error.strerror or error}); check the file, or pull the model again."
        ) from error


class RangedBytes:
    """A file that `read(offset, length)` gives pieces of, each request at a price.

    Windows double from request to request: most headers take one or two, the largest five.
    """

    remedy = "choose another file or another repository"

    def __init__(
        self,
        name: str,
        size_bytes: int | None,
        read: Callable[[int, int], bytes],
        first_window_bytes: int = _FIRST_RANGE_BYTES,
    ) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self._read = read
        self._window_bytes = first_window_bytes

    def fetch(self, offset: int, num_bytes: int) -> bytes:
        end = offset + max(num_bytes, self._window_bytes)
        if self.size_bytes is not None:
            end = min(end, self.size_bytes)
        self._window_bytes = min(2 * self._window_bytes, _LARGEST_RANGE_BYTES)
        pieces: list[bytes] = []
        while offset < end:
            asked = min(end - offset, _LARGEST_RANGE_BYTES)
            piece = self._read(offset, asked)[:asked]
            pieces.append(piece)
            offset += len(piece)
            if len(piece) < asked:
                break
        return b"".join(pieces)
