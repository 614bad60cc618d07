"""How long a model stays in memory after its last request, as people and programs write it.

The grammar is Ollama's: `"5m"`, `"1h30m"`, `300` or `"300"` (seconds), 0 (unload after the request), anything
negative (for ever).  Inside the daemon a keep-alive is a number of seconds, `math.inf` for ever.  Pure text and
arithmetic; called by `app.settings`, the request translations and the commands.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

from engine.api.errors import InvalidParameter

FOREVER = math.inf

_UNITS_S = {
    "h": Decimal(3600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "μs": Decimal("1e-6"),
    "ns": Decimal("1e-9"),
}
_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_PART = re.compile(rf"({_NUMBER})(ns|us|µs|μs|ms|s|m|h)")
_TEXT = re.compile(rf"(?P<sign>[+-]?)(?:(?P<seconds>{_NUMBER})|(?P<parts>(?:{_PART.pattern})+))")
_MAX_TEXT_LENGTH = 64


def parse_keep_alive(value: str | int | float) -> float:
    """Seconds, at least 0; `math.inf` for ever.  Raises `InvalidParameter` for what is no duration."""
    if isinstance(value, str):
        return _parse_text(value.strip())
    if isinstance(value, bool) or value != value:
        raise _not_a_duration(value)
    try:
        seconds = float(value)
    except OverflowError:
        return FOREVER
    return FOREVER if seconds < 0 else seconds


def granted_keep_alive(asked: str | int | float | None, most: float) -> float | None:
    """What a client gets of what it asks for, in seconds: never above `most`; None where it does not ask.

    Raises `InvalidParameter`.
    """
    return None if asked is None else min(parse_keep_alive(asked), most)


def format_keep_alive(seconds: float) -> str:
    """5400 → "1h30m", `math.inf` → "-1"; `parse_keep_alive` reads it back, to the millisecond."""
    if math.isinf(seconds):
        return "-1"
    left_ms = round(seconds * 1000)
    parts = []
    for unit, unit_ms in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left_ms = divmod(left_ms, unit_ms)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0"


def _parse_text(text: str) -> float:
    match = _TEXT.fullmatch(text) if len(text) <= _MAX_TEXT_LENGTH else None
    if match is None:
        raise _not_a_duration(text)
    if match["seconds"]:
        total = Decimal(match["seconds"])
    else:
        total = sum((Decimal(number) * _UNITS_S[unit] for number, unit in _PART.findall(match["parts"])), Decimal())
    return FOREVER if match["sign"] == "-" and total else float(total)


def _not_a_duration(value: Any) -> InvalidParameter:
    shown = ascii(value)
    shown = shown if len(shown) <= _MAX_TEXT_LENGTH else shown[: _MAX_TEXT_LENGTH - 3] + "..."
    return InvalidParameter(
        "keep_alive",
        f"keep_alive {shown} is not a duration; write it like 5m or 1h30m, as seconds, as 0 to unload at once, or as "
        "-1 to keep the model.",
    )
