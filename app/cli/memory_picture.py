"""A device's memory as a picture of text: a bar for each model, one behind the other, as parts of the whole.

Pure; knows sizes and names, not what they mean.  Called by `quire plan`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_BLOCKS = "█▓░"
_PLAIN_BLOCKS = "#=-"
_REST, _PLAIN_REST = "·", "."
PART_NAMES = ("weights", "workspace", "KV cache")


@dataclass(frozen=True, slots=True)
class Bar:
    """One model: bytes of its weights, workspace and KV cache."""

    name: str
    parts: tuple[int, int, int]


def memory_picture(
    bars: Sequence[Bar], total_bytes: int, limit_bytes: int, *, num_columns: int, is_plain: bool | None = None
) -> list[str]:
    """A line for each bar and one that says what is what; what lies beyond the limit stays blank.

    `is_plain` is for terminals that show ASCII alone.
    """
    plain = not _shows_blocks() if is_plain is None else is_plain
    blocks, rest = (_PLAIN_BLOCKS, _PLAIN_REST) if plain else (_BLOCKS, _REST)
    names = [_cut(bar.name, num_columns // 3) for bar in bars]
    name_columns = max(map(len, names), default=0)
    width = max(10, num_columns - name_columns - 4)
    num_within = round(min(limit_bytes, total_bytes) * width / max(1, total_bytes))
    lines = []
    begin = 0
    for name, bar in zip(names, bars, strict=True):
        drawn = [rest] * num_within + [" "] * (width - num_within)
        for cell, part in _cells(begin, bar.parts, max(1, total_bytes), width).items():
            drawn[cell] = blocks[part]
        lines.append(f"{name:<{name_columns}}  [{''.join(drawn)}]")
        begin += sum(bar.parts)
    legend = "  ".join(f"{block} {name}" for block, name in zip(blocks, PART_NAMES, strict=True))
    return [*lines, f"{'':<{name_columns}}   {legend}  {rest} free"]


def _cells(begin: int, parts: Iterable[int], total: int, width: int) -> dict[int, int]:
    """The part of each cell of a bar that has one; a part that is there has one cell at least."""
    cells: dict[int, int] = {}
    for index, size in enumerate(parts):
        first, last = (min(width, round(edge * width / total)) for edge in (begin, begin + size))
        cells |= dict.fromkeys(range(first, last), index)
        if size > 0 and first == last < width:
            cells[first] = index
        begin += size
    return cells


def _cut(name: str, columns: int) -> str:
    return name if len(name) <= columns else name[: max(1, columns - 3)] + "..."


def _shows_blocks() -> bool:
    try:
        (_BLOCKS + _REST).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
