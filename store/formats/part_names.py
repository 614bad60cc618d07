"""Names of the files that one model is split into: `NAME-00001-of-00003.gguf`, and safetensors shards likewise.

The one place that reads and writes them.  Pure; called wherever a file has to stand for its whole model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from store.formats.limits import MAX_PARTS

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)")


@dataclass(frozen=True, slots=True)
class PartName:
    """`number` counts from 1; `stem` is what all parts' names begin with, folders included."""

    stem: str
    number: int
    count: int
    suffix: str

    def siblings(self) -> list[str]:
        """The names of all parts, in order."""
        numbers = range(1, self.count + 1)
        return [f"{self.stem}-{number:05d}-of-{self.count:05d}{self.suffix}" for number in numbers]


def parse_part_name(name: str) -> PartName | None:
    """None for a file that is whole, or whose numbers make no sense."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    number, count = int(match["number"]), int(match["count"])
    return PartName(match["stem"], number, count, match["suffix"]) if 1 <= number <= count <= MAX_PARTS else None


def part_paths(path: Path) -> list[Path]:
    """As `part_names`, beside `path`, whether they are there or not."""
    return [path.with_name(name) for name in part_names(path.name)]


def part_names(name: str) -> list[str]:
    """Names of all files of the model that the file `name` is a part of, in order; `name` alone for a whole one."""
    part = parse_part_name(name)
    return [name] if part is None else part.siblings()
