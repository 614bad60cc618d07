"""How devices, spans of time and lists are said in one sentence.  Pure; used by all of `app.residency` and `app.cli`.

Sizes are said by `store.space.format_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence


def memory_name(device: str) -> str:
    """What people call a device's memory."""
    return "RAM" if device == "cpu" else device


def span_text(seconds: float) -> str:
    """720 → "12 min", 7300 → "2 h"; one unit, since more would claim to matter."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def list_text(names: Sequence[str]) -> str:
    """("a", "b", "c") → "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
