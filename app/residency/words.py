"""How sizes of memory, spans of time and lists are said in one sentence.  Pure; used by all of `app.residency`."""

from __future__ import annotations

from collections.abc import Sequence

GIB = 2**30
MIB = 2**20


def memory_text(size_bytes: int) -> str:
    """5_476_083_302 → "5.1 GiB", 94_371_840 → "90 MiB"; binary units, as memory is sold."""
    if abs(size_bytes) >= 1000 * MIB:
        return f"{size_bytes / GIB:.1f} GiB"
    return f"{size_bytes / MIB:.0f} MiB" if abs(size_bytes) >= 10 * MIB else f"{size_bytes / MIB:.1f} MiB"


def span_text(seconds: float) -> str:
    """720 → "12 min", 7300 → "2 h"; one unit, since more would claim to matter."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def list_text(names: Sequence[str]) -> str:
    """("a", "b", "c") → "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
