"""Link object code with LLVM's ORC, into memory of this process: for what `engine.cpu.elf_object` does not know.

Costs 40 MiB of memory, which is LLVM itself.  Imported by `engine.cpu.code_cache` where it is needed.
"""

from __future__ import annotations

import functools
import uuid

import llvmlite.binding as llvm

from engine.cpu.code_image import CodeRefused
from engine.cpu.kernel import ENTRY


def load_object(content: bytes) -> int:
    """The address of a kernel's function.  Raises `CodeRefused` where it refers to what this process does not have."""
    library = llvm.JITLibraryBuilder().add_object_img(content).add_current_process().export_symbol(ENTRY)
    try:
        tracker = library.link(_linker(), uuid.uuid4().hex)
    except RuntimeError as error:
        raise CodeRefused(str(error)) from error
    address = int(tracker[ENTRY])
    # Recorded programs hold the address alone, so the code stays for good.
    tracker.detach()
    return address


@functools.cache
def _linker() -> llvm.LLJIT:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler(suppress_errors=True)
