"""`fitted_lines`: a table that gives way to a narrow terminal, so that none of its lines fills a second.

Pure text.  Called by `quire ps` and `quire plan`, whose tables have more columns than half a screen holds.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence

from app.cli.output import display_width, shortened, table_lines

PIPED_COLUMNS = 100
"""How wide pictures are where no terminal says how wide it is."""
_LEAST_NAME_COLUMNS = 14


def picture_columns() -> int:
    """The width that there is for a picture."""
    return shutil.get_terminal_size((PIPED_COLUMNS, 24)).columns


def table_columns() -> int | None:
    """The width that there is for a table; a pipe takes every column whole."""
    return picture_columns() if sys.stdout.isatty() else None


def fitted_lines(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    num_columns: int | None,
    *,
    short_titles: Mapping[str, str],
    spare_titles: Sequence[str],
) -> list[str]:
    """A table of at most `num_columns`, where that is possible; None for as wide as it is.

    Titles are shortened first, then the names in the first column, and then the columns `spare_titles` are left out
    one after another.
    """
    lines = table_lines(header, rows)
    if num_columns is None or _width(lines) <= num_columns:
        return lines
    shown = list(range(len(header)))
    for spare in (None, *map(header.index, spare_titles)):
        if spare is not None:
            shown.remove(spare)
        titles = [short_titles.get(header[index], header[index]) for index in shown]
        cells = [[row[index] for index in shown] for row in rows]
        excess = _width(table_lines(titles, cells)) - num_columns
        name_columns = max((display_width(row[0]) for row in rows), default=0) - max(0, excess)
        if excess <= 0 or name_columns >= _LEAST_NAME_COLUMNS:
            break
    name_columns = max(name_columns, _LEAST_NAME_COLUMNS) if excess > 0 else num_columns
    return table_lines(titles, [(shortened(name, name_columns), *others) for name, *others in cells])


def _width(lines: Sequence[str]) -> int:
    return max(map(display_width, lines))
