"""Objects of the compiler become images that run, and everything else is refused."""

from __future__ import annotations

import ctypes
import platform
import sys

import llvmlite.binding as llvm
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cpu.code_image import CodeImage, CodeRefused, place
from engine.cpu.elf_object import Unlinkable, link_object

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() != "x86_64",
    reason="only on 64-bit x86 Linux are objects linked without LLVM",
)

# A constant in memory, a function of the object's own, one of the C library's, and a table of addresses.
MODULE = """
target triple = "x86_64-unknown-linux-gnu"
@weights = internal constant [4 x i64] [i64 10, i64 20, i64 30, i64 40]
declare i64 @labs(i64)
define internal i64 @square(i64 %x) noinline {
  %y = mul i64 %x, %x
  ret i64 %y
}
define i64 @kernel(i64 %index, i64 %x) {
  %place = getelementptr [4 x i64], ptr @weights, i64 0, i64 %index
  %weight = load i64, ptr %place
  %positive = call i64 @labs(i64 %x)
  %squared = call i64 @square(i64 %positive)
  %sum = add i64 %weight, %squared
  switch i64 %index, label %other [i64 0, label %zero  i64 1, label %one  i64 2, label %two  i64 3, label %three]
zero:
  ret i64 %sum
one:
  call i64 @labs(i64 %sum)
  %minus = sub i64 0, %sum
  ret i64 %minus
two:
  %double = mul i64 %sum, 2
  ret i64 %double
three:
  %half = sdiv i64 %sum, 2
  ret i64 %half
other:
  ret i64 0
}
"""
DATA = """
target triple = "x86_64-unknown-linux-gnu"
@counter = global i64 7
define i64 @kernel() {
  %x = load i64, ptr @counter
  ret i64 %x
}
"""


def emitted(assembly: str, triple: str = "x86_64-unknown-linux-gnu", code_model: str = "jitdefault") -> bytes:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        opt=0, reloc="static", codemodel=code_model, jit=True
    )
    return machine.emit_object(llvm.parse_assembly(assembly))


@pytest.fixture(scope="module")
def content() -> bytes:
    return emitted(MODULE)


def test_an_image_computes_what_its_source_says(content: bytes) -> None:
    image = link_object(content, "kernel")
    assert {name for name, _ in image.external_places} == {"labs"}
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(place(image))
    assert [function(index, -3) for index in range(5)] == [19, -29, 78, 24, 0]


def test_every_image_has_memory_of_its_own(content: bytes) -> None:
    image = link_object(content, "kernel")
    assert place(image) != place(image)


def test_a_symbol_that_the_process_lacks_is_named(content: bytes) -> None:
    image = link_object(emitted(MODULE.replace("labs", "no_such_function")), "kernel")
    with pytest.raises(CodeRefused, match="no_such_function"):
        place(image)


def test_the_entry_must_be_there(content: bytes) -> None:
    with pytest.raises(Unlinkable, match="no other"):
        link_object(content, "other")


@pytest.mark.parametrize(
    ("assembly", "triple", "code_model", "reason"),
    [
        (DATA, "x86_64-unknown-linux-gnu", "jitdefault", "a section of kind 1 and flags"),
        (MODULE, "x86_64-unknown-linux-gnu", "small", "a relocation of kind"),
        (MODULE.replace("x86_64-", "aarch64-"), "aarch64-unknown-linux-gnu", "jitdefault", "64-bit x86"),
    ],
)
def test_what_it_does_not_know_is_refused(assembly: str, triple: str, code_model: str, reason: str) -> None:
    with pytest.raises(Unlinkable, match=reason):
        link_object(emitted(assembly, triple, code_model), "kernel")


@given(data=st.data())
def test_a_damaged_object_is_linked_or_refused(content: bytes, data: st.DataObject) -> None:
    """Nothing else happens, wherever bytes are changed or missing."""
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(0, 8))):
        damaged[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    try:
        image = link_object(bytes(damaged[:cut]), "kernel")
    except Unlinkable:
        return
    assert isinstance(image, CodeImage)
    assert all(offset + 8 <= len(image.code) for offset in image.local_places)


@given(st.binary(max_size=400))
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(Unlinkable):
        link_object(content, "kernel")
