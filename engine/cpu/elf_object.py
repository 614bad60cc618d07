"""Link one relocatable ELF object into a `CodeImage`: what LLVM emits for a kernel on 64-bit x86 Linux.

Strict: whatever it does not know is refused, and `engine.cpu.code_cache` then leaves linking to LLVM.  One kind of
relocation is known, the 64-bit address, which is all that LLVM's code model for JIT compilers uses; data that code
could write to is refused.  Tables for unwinding the stack are left out, since kernels raise nothing.

Layout: System V ABI, chapter 4, https://refspecs.linuxfoundation.org/elf/gabi4+/ch4.intro.html, and its supplement
for AMD64, https://gitlab.com/x86-psABIs/x86-64-ABI (R_X86_64_64 is the symbol's address plus the addend).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from engine.cpu.code_image import CodeImage

_IDENTITY = b"\x7fELF\x02\x01\x01"
"""64 bits, little endian, version 1."""
_RELOCATABLE, _X86_64 = 1, 62
_PROGRAM_BITS, _SYMBOL_TABLE, _RELOCATIONS, _RELOCATIONS_WITHOUT_ADDENDS, _UNWINDING = 1, 2, 4, 9, 0x70000001
_WRITABLE, _IN_MEMORY = 1, 2
_UNDEFINED = 0
_ADDRESS_64 = 1
_MAX_ALIGNMENT = 4096

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QIIq")
_NUMBER = struct.Struct("<q")


class Unlinkable(Exception):
    """An object that this linker does not know how to link; says why."""


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


@dataclass(frozen=True, slots=True)
class _Symbol:
    """`section` is `_UNDEFINED` for one of another library's."""

    name: str
    section: int
    value: int


def link_object(content: bytes, entry: str) -> CodeImage:
    """The image of an object whose function `entry` is to be called.  Raises `Unlinkable`."""
    try:
        return _link(content, entry)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise Unlinkable(f"the object is damaged ({error})") from error


def _link(content: bytes, entry: str) -> CodeImage:
    sections = _read_sections(content)
    code, places = _lay_out(content, sections)
    symbols = _read_symbols(content, sections)
    local: list[int] = []
    external: list[tuple[str, int]] = []
    for section in sections:
        if section.kind == _RELOCATIONS_WITHOUT_ADDENDS:
            raise Unlinkable("it has relocations without addends")
        if section.kind != _RELOCATIONS or section.info not in places:
            continue
        for offset, kind, index, addend in _RELOCATION.iter_unpack(_bytes(content, section)):
            if kind != _ADDRESS_64:
                raise Unlinkable(f"it has a relocation of kind {kind}")
            if offset + _NUMBER.size > sections[section.info].size:
                raise Unlinkable("it has a relocation outside its section")
            place, symbol = places[section.info] + offset, symbols[index]
            if symbol.section == _UNDEFINED:
                external.append((symbol.name, place))
                _NUMBER.pack_into(code, place, addend)
            else:
                local.append(place)
                _NUMBER.pack_into(code, place, _offset_of(symbol, places) + addend)
    for symbol in symbols:
        if symbol.name == entry and symbol.section != _UNDEFINED:
            return CodeImage(bytes(code), _offset_of(symbol, places), tuple(local), tuple(external))
    raise Unlinkable(f"it has no {entry}")


def _read_sections(content: bytes) -> list[_Section]:
    identity, kind, machine, *_, start, _, _, _, _, entry_size, count, _ = _HEADER.unpack_from(content)
    if not identity.startswith(_IDENTITY) or (kind, machine) != (_RELOCATABLE, _X86_64):
        raise Unlinkable("it is no relocatable ELF object for 64-bit x86")
    if entry_size != _SECTION.size:
        raise Unlinkable(f"its sections have entries of {entry_size} bytes")
    return [_Section(*_SECTION.unpack_from(content, start + index * entry_size)) for index in range(count)]


def _lay_out(content: bytes, sections: list[_Section]) -> tuple[bytearray, dict[int, int]]:
    """What must be in memory, one section behind the other, and each one's offset by its number."""
    code = bytearray()
    places: dict[int, int] = {}
    for number, section in enumerate(sections):
        if not section.flags & _IN_MEMORY or section.kind == _UNWINDING or not section.size:
            continue
        if section.kind != _PROGRAM_BITS or section.flags & _WRITABLE:
            raise Unlinkable(f"it has a section of kind {section.kind} and flags {section.flags:#x}")
        if section.alignment > _MAX_ALIGNMENT:
            raise Unlinkable(f"it has a section aligned to {section.alignment} bytes")
        code += bytes(-len(code) % max(1, section.alignment))
        places[number] = len(code)
        code += _bytes(content, section)
    return code, places


def _read_symbols(content: bytes, sections: list[_Section]) -> list[_Symbol]:
    table = next((section for section in sections if section.kind == _SYMBOL_TABLE), None)
    if table is None:
        raise Unlinkable("it has no symbols")
    names = _bytes(content, sections[table.link])
    entries = _SYMBOL.iter_unpack(_bytes(content, table))
    return [_Symbol(_string(names, name), section, value) for name, _, _, section, value, _ in entries]


def _string(strings: bytes, start: int) -> str:
    end = strings.find(b"\0", start)
    if end < 0:
        raise Unlinkable("it has a name without an end")
    return strings[start:end].decode()


def _offset_of(symbol: _Symbol, places: dict[int, int]) -> int:
    if symbol.section not in places:
        raise Unlinkable(f"it refers to {symbol.name!r} in section {symbol.section}, which is not kept")
    return places[symbol.section] + symbol.value


def _bytes(content: bytes, section: _Section) -> bytes:
    if section.offset + section.size > len(content):
        raise Unlinkable("a section ends behind the object")
    return content[section.offset : section.offset + section.size]
