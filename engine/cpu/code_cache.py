"""Addresses of kernels: from machine code on disk, and through the compiler only for what is not there.

A file holds the digest of all that its code depends on and of the code itself, then the code: an image that only
needs a place in memory, or, where `engine.cpu.elf_object` does not know how to make one, an object that LLVM links
at every start.  So what is damaged, truncated, or of another version or processor is compiled again, never run.
Called by `engine.cpu.program` and `engine.cpu.team`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.cpu.code_image import CodeImage, CodeRefused, place
from engine.cpu.elf_object import Unlinkable, link_object
from engine.cpu.isa import describe_processor
from engine.cpu.kernel import ENTRY, Kernel

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "QUIRE_CODE_CACHE"
"""Names a folder that goes before any other."""

_DIGEST_BYTES = 32


class ObjectCode(msgspec.Struct, frozen=True, tag="object"):
    """What the compiler emitted, to be linked by LLVM."""

    content: bytes


Code = CodeImage | ObjectCode


def kernel_address(kernel: Kernel, folder: Path | None) -> int:
    """Of the kernel in this process, where it then stays; its code is kept in `folder`, None: nowhere."""
    given = os.environ.get(FOLDER_VARIABLE)
    return _loaded(kernel, Path(given) if given else folder).address


@dataclass(frozen=True, slots=True)
class _Loaded:
    """`owner`, where there is one, keeps the code in memory."""

    address: int
    owner: object = None


@functools.cache
def _loaded(kernel: Kernel, folder: Path | None) -> _Loaded:
    identity = _identity()
    path = None if folder is None else _place(kernel, folder, identity)
    found = None if path is None else _read(path, identity)
    if found is not None:
        try:
            return _Loaded(_load(found))
        except CodeRefused as error:
            log.warning("A compiled kernel cannot be loaded and is compiled again: %s", error)
    return _compiled(kernel, path, identity)


def _place(kernel: Kernel, folder: Path, identity: bytes) -> Path:
    return folder / hashlib.sha256(identity).hexdigest()[:16] / kernel.file_name


def _compiled(kernel: Kernel, path: Path | None, identity: bytes) -> _Loaded:
    from engine.cpu.compiler import compile_kernel

    compiled = compile_kernel(kernel)
    code = _linked(compiled.object_code)
    try:
        loaded = _Loaded(_load(code))
    except CodeRefused as error:
        log.warning(
            "The kernel %s, which needs %s, is compiled again at every start: %s",
            kernel.name, ", ".join(compiled.externals) or "nothing", error,
        )  # fmt: skip
        return _Loaded(int(compiled.function.address), compiled.function)
    if path is not None:
        _write(path, identity, msgspec.msgpack.encode(code))
    return loaded


def _linked(object_code: bytes) -> Code:
    try:
        return link_object(object_code, ENTRY)
    except Unlinkable as error:
        log.debug("LLVM links this kernel at every start: %s", error)
        return ObjectCode(object_code)


def _load(code: Code) -> int:
    """The address of code, in memory from now on.  Raises `CodeRefused`."""
    if isinstance(code, CodeImage):
        return place(code)
    from engine.cpu.object_linker import load_object

    return load_object(code.content)


@functools.cache
def _identity() -> bytes:
    """Everything that code depends on beside its kernel: this package's sources, the compiler, the processor."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    versions = (importlib.metadata.version(name) for name in ("llvmlite", "numba"))
    return "\n".join((sources.hexdigest(), *versions, describe_processor())).encode()


def _read(path: Path, identity: bytes) -> Code | None:
    """The code in a file; None where there is none that can be trusted."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code = content[_DIGEST_BYTES:]
    if content[:_DIGEST_BYTES] != _digest(identity, code):
        return None
    decoded: Code = msgspec.msgpack.decode(code, type=Code)
    return decoded


def _write(path: Path, identity: bytes, code: bytes) -> None:
    """Replace the file at once; where that fails, the next start compiles again."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(_digest(identity, code) + code)
        temporary.replace(path)
    except OSError as error:
        _warn_unwritable(path.parent, error.strerror or type(error).__name__)
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@functools.cache
def _warn_unwritable(folder: Path, reason: str) -> None:
    """Once for all kernels."""
    log.warning("Compiled kernels cannot be kept in %s (%s); they are compiled again at every start.", folder, reason)


def _digest(identity: bytes, code: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(identity).digest() + code).digest()
