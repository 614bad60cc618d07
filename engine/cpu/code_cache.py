"""Addresses of kernels: from object code on disk, and through the compiler only for what is not there.

A file holds the digest of all that its code depends on and of the code itself, then the code.  So what is damaged,
truncated, or of another version or processor is compiled again, never run.  Objects are linked by LLVM's ORC, which
reports a symbol that this process lacks as an error.  Called by `engine.cpu.program` and `engine.cpu.team`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from engine.cpu.isa import host_cpu
from engine.cpu.kernel import ENTRY, Kernel

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "QUIRE_CODE_CACHE"
"""Names a folder that goes before any other."""

_DIGEST_BYTES = 32


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
            return _linked(found)
        except RuntimeError as error:
            log.warning("A compiled kernel cannot be loaded and is compiled again: %s", error)
    return _compiled(kernel, path, identity)


def _place(kernel: Kernel, folder: Path, identity: bytes) -> Path:
    return folder / hashlib.sha256(identity).hexdigest()[:16] / kernel.file_name


def _compiled(kernel: Kernel, path: Path | None, identity: bytes) -> _Loaded:
    from engine.cpu.compiler import compile_kernel

    compiled = compile_kernel(kernel)
    try:
        loaded = _linked(compiled.object_code)
    except RuntimeError as error:
        log.warning(
            "The kernel %s, which needs %s, is compiled again at every start: %s",
            kernel.name, ", ".join(compiled.externals), error,
        )  # fmt: skip
        return _Loaded(int(compiled.function.address), compiled.function)
    if path is not None:
        _write(path, identity, compiled.object_code)
    return loaded


def _linked(object_code: bytes) -> _Loaded:
    """Load object code; raises `RuntimeError` where it refers to what this process does not have."""
    library = llvm.JITLibraryBuilder().add_object_img(object_code).add_current_process().export_symbol(ENTRY)
    tracker = library.link(_linker(), uuid.uuid4().hex)
    loaded = _Loaded(int(tracker[ENTRY]))
    # Recorded programs hold the address alone, so the code stays for good.
    tracker.detach()
    return loaded


@functools.cache
def _linker() -> llvm.LLJIT:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler(suppress_errors=True)


@functools.cache
def _identity() -> bytes:
    """Everything that code depends on beside its kernel: this package's sources, the compiler, the processor."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    versions = (llvmlite.__version__, *llvm.llvm_version_info, importlib.metadata.version("numba"))
    cpu = host_cpu()
    parts = (sources.hexdigest(), *versions, llvm.get_process_triple(), cpu.name, cpu.features)
    return "\n".join(map(str, parts)).encode()


def _read(path: Path, identity: bytes) -> bytes | None:
    """The code in a file; None where there is none that can be trusted."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    object_code = content[_DIGEST_BYTES:]
    return object_code if content[:_DIGEST_BYTES] == _digest(identity, object_code) else None


def _write(path: Path, identity: bytes, object_code: bytes) -> None:
    """Replace the file at once; where that fails, the next start compiles again."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(_digest(identity, object_code) + object_code)
        temporary.replace(path)
    except OSError as error:
        _warn_unwritable(path.parent, error.strerror or type(error).__name__)
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@functools.cache
def _warn_unwritable(folder: Path, reason: str) -> None:
    """Once for all kernels."""
    log.warning("Compiled kernels cannot be kept in %s (%s); they are compiled again at every start.", folder, reason)


def _digest(identity: bytes, object_code: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(identity).digest() + object_code).digest()
