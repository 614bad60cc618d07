"""Bar pictures of memory, in plain characters of one column each: who holds how much of a device, and for what.

Pure text; called by `app.cli.running_table` and `app.cli.plan_view`.  ASCII alone: block characters take two columns
in some terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.cli.output import display_width, shortened
from store.space import format_bytes

MODEL_FILLS = "#=+*%@"
"""One for each model in turn; the seventh begins again."""
OTHERS_FILL, FREE_FILL, KEPT_FILL = "x", ".", "-"
KEPT_LABEL = "above memory_limit"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the bar: what it is drawn with, what that stands for, and how much it is."""

    fill: str
    label: str
    size_bytes: int


def bar(parts: Sequence[Part], num_columns: int) -> str:
    """The parts in proportion, `num_columns` wide in all; a part that is not empty has a column at least."""
    return "".join(
        part.fill * width
        for part, width in zip(parts, _widths([part.size_bytes for part in parts], num_columns), strict=True)
    )


def picture(title: str, parts: Sequence[Part], num_columns: int) -> list[str]:
    """`title  [####==xx....]  150.8 GB` and below it what each character stands for."""
    total = format_bytes(sum(part.size_bytes for part in parts))
    # Two spaces beside the brackets, which take a column each.
    width = max(10, num_columns - len(title) - len(total) - 6)
    legend = [f"{part.fill} {part.label} {format_bytes(part.size_bytes)}" for part in parts]
    return [
        f"{title}  [{bar(parts, width)}]  {total}",
        *_wrapped(legend, num_columns, indent=len(title) + 2),
    ]


def staircase(
    bars: Sequence[tuple[str, Sequence[int]]],
    labels: Sequence[str],
    *,
    free_bytes: int,
    kept_bytes: int,
    num_columns: int,
) -> list[str]:
    """A line for each bar, which begins where the one before it ended, and one that says what is what.

    `bars` are names with the bytes of their parts, `labels` what the parts are called.
    """
    names = [shortened(name, num_columns // 3) for name, _ in bars]
    name_columns = max(map(display_width, names), default=0)
    fills = [*MODEL_FILLS[: len(labels)] * len(bars), FREE_FILL, KEPT_FILL]
    sizes = [size for _, parts in bars for size in parts]
    # Two spaces, and the brackets.
    widths = _widths([*sizes, free_bytes, kept_bytes], max(10, num_columns - name_columns - 4))
    cells = [fill * width for fill, width in zip(fills, widths, strict=True)]
    lines = []
    for index, name in enumerate(names):
        own = range(index * len(labels), (index + 1) * len(labels))
        drawn = [cell if at in own or at == len(sizes) + 1 else FREE_FILL * len(cell) for at, cell in enumerate(cells)]
        lines.append(f"{name}{' ' * (name_columns - display_width(name))}  [{''.join(drawn)}]")
    legend = [f"{fill} {label}" for fill, label in zip(MODEL_FILLS, labels, strict=False)]
    legend += [f"{FREE_FILL} free"] + ([f"{KEPT_FILL} {KEPT_LABEL}"] if kept_bytes else [])
    return [*lines, *_wrapped(legend, num_columns, indent=name_columns + 3)]


def _wrapped(items: Sequence[str], num_columns: int, indent: int) -> list[str]:
    """The items in as many lines as they need, none of them broken."""
    lines: list[str] = []
    for item in items:
        if lines and indent + display_width(f"{lines[-1]}   {item}") <= num_columns:
            lines[-1] += f"   {item}"
        else:
            lines.append(item)
    return [" " * indent + line for line in lines]


def _widths(sizes: Sequence[int], num_columns: int) -> list[int]:
    """Whole columns in proportion to `sizes`, by largest remainder (Hamilton's method)."""
    total = sum(sizes)
    if total <= 0:
        return [0] * len(sizes)
    shown = sum(size > 0 for size in sizes)
    spare = max(0, num_columns - shown)
    exact = [spare * size / total for size in sizes]
    widths = [int(width) + (size > 0) for width, size in zip(exact, sizes, strict=True)]
    by_remainder = sorted(range(len(sizes)), key=lambda index: int(exact[index]) - exact[index])
    for index in by_remainder[: max(0, num_columns - sum(widths))]:
        widths[index] += 1
    return widths
