"""Give memory that was freed on the C heap back to the system.

Reading a vocabulary makes some hundred thousand small allocations, short-lived and lasting ones side by side, and
the C library keeps the pages that the short-lived ones leave empty.  Called where a tokenizer is loaded.
"""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Return the empty pages of the heap, in about a millisecond; does nothing where the C library has no such call."""
    if sys.platform != "linux":
        return
    # glibc has it, musl has not: https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
