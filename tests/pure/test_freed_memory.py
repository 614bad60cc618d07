"""Returning freed heap to the system: where the C library can, and harmless where not."""

from __future__ import annotations

import ctypes
import sys

import pytest

from engine.text import freed_memory
from engine.text.freed_memory import return_freed_memory


class LibraryWithTrim:
    def __init__(self) -> None:
        self.pads: list[object] = []

    def malloc_trim(self, pad: ctypes.c_size_t) -> int:
        self.pads.append(pad.value)
        return 1


def test_the_call_of_this_machine_is_harmless() -> None:
    return_freed_memory()


def test_everything_that_is_free_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    library = LibraryWithTrim()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: library)
    return_freed_memory()
    assert library.pads == [0]


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_a_library_without_the_call_is_left_alone(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_library(name: None) -> object:
        assert platform == "linux", "only Linux has glibc"
        return object()

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", open_library)
    return_freed_memory()
