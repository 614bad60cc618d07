"""`CodeImage`: machine code that needs no linker any more, only a place in memory.

`engine.cpu.elf_object` makes it when a kernel is compiled, so that a start which finds it on disk loads no LLVM.
Whoever places an image must trust it: it is run.  Used by `engine.cpu.code_cache`.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct

import msgspec

_POINTER = struct.Struct("<Q")
_ADDRESS_SPACE = 1 << 64
_FAILED = ctypes.c_void_p(-1).value


class CodeImage(msgspec.Struct, frozen=True, tag="image"):
    """`code` as it would lie at address 0, `entry` the offset of its function.

    The 64-bit numbers at `local_places` are addresses in the image itself, to which its own is added; those at
    `external_places`, pairs of a symbol of this process and an offset, get the symbol's added.
    """

    code: bytes
    entry: int
    local_places: tuple[int, ...]
    external_places: tuple[tuple[str, int], ...]


class CodeRefused(RuntimeError):
    """Code that cannot run in this process; says why."""


def place(image: CodeImage) -> int:
    """Put an image into memory of its own, where it stays for good; returns the address of its function.

    The memory is never writable and executable at once.  Raises `CodeRefused` where a symbol is missing or the
    system allows no such memory.  For Linux.
    """
    additions = [(offset, _symbol(name)) for name, offset in image.external_places]
    base = _reserve(len(image.code))
    code = bytearray(image.code)
    for offset, amount in (*((offset, base) for offset in image.local_places), *additions):
        (number,) = _POINTER.unpack_from(code, offset)
        _POINTER.pack_into(code, offset, (number + amount) % _ADDRESS_SPACE)
    ctypes.memmove(base, bytes(code), len(code))
    if _process().mprotect(base, len(code), mmap.PROT_READ | mmap.PROT_EXEC):
        raise CodeRefused(f"the system lets no memory be run ({os.strerror(ctypes.get_errno())})")
    return base + image.entry


def _symbol(name: str) -> int:
    try:
        function = _process()[name]
    except AttributeError as error:
        raise CodeRefused(f"this process has no {name}") from error
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _reserve(num_bytes: int) -> int:
    """Writable memory that begins at a page and belongs to nobody else.

    Not `mmap.mmap`, which unmaps what no Python object refers to: recorded programs hold addresses alone.
    """
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address: int | None = _process().mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
    if address is None or address == _FAILED:
        raise CodeRefused(f"there is no memory for it ({os.strerror(ctypes.get_errno())})")
    return address


@functools.cache
def _process() -> ctypes.CDLL:
    """All symbols of this process."""
    process = ctypes.CDLL(None, use_errno=True)
    process.mmap.restype = ctypes.c_void_p
    process.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    process.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return process
