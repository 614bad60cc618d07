"""What commands write: results to stdout, everything else to stderr.

Formatting is plain text and pure; colours and bars are in `app.cli.progress`.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_CONTROL_CHARACTERS = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}
_AGES = ((365 * 86400, "year"), (30 * 86400, "month"), (86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def tolerate_any_streams() -> None:
    """Let a terminal or pipe of a small encoding show `?` where it must, and take a closed stream for an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # open to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def notice(text: str) -> None:
    """A line for people, on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write_text(text: str) -> None:
    """A piece of a result on stdout, visible at once.

    A terminal gets it without control characters: what a model writes must not move the
    cursor, retitle the window or write to the clipboard.
    """
    sys.stdout.write(text.translate(_CONTROL_CHARACTERS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """A result as indented JSON on stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def write_json_line(value: Any) -> None:
    """One of several results, as JSON on a line of its own, visible at once."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def write_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, may_cut: bool = False) -> None:
    """A table on stdout; with `may_cut` its last column ends where a terminal ends, so that no line fills a second."""
    num_columns = shutil.get_terminal_size().columns if may_cut and sys.stdout.isatty() else None
    for line in table_lines(header, rows):
        sys.stdout.write(line[:num_columns].rstrip() + "\n")


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their longest cell, two spaces apart."""
    widths = [max(map(display_width, column)) for column in zip(header, *rows, strict=True)]
    lines = (
        "  ".join(cell + " " * (width - display_width(cell)) for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    )
    return [line.rstrip() for line in lines]


def display_width(text: str) -> int:
    """How wide a terminal shows a text: Chinese characters and their like take two columns each."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def shortened(text: str, num_columns: int) -> str:
    """A text of at most so many columns; a longer one loses its beginning, which tells less of a model's name."""
    if display_width(text) <= num_columns:
        return text
    while text and display_width(text) >= num_columns:
        text = text[1:]
    return f"…{text}"


def format_duration(seconds: float) -> str:
    """100 → "1 min 40 s", 0.3 → "less than a second"."""
    if seconds < 1:
        return "less than a second"
    minutes, left_s = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{left_s} s"
    hours, left_min = divmod(minutes, 60)
    return f"{hours} h {left_min} min" if hours else f"{minutes} min {left_s} s"


def format_age(timestamp: str, *, now: datetime | None = None) -> str:
    """An RFC 3339 time → "3 days ago"."""
    elapsed_s = ((now or datetime.now(UTC)) - datetime.fromisoformat(timestamp)).total_seconds()
    for seconds, unit in _AGES:
        if elapsed_s >= seconds:
            count = int(elapsed_s // seconds)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
