"""Questions to the person at the terminal; answers come from stdin, questions go to stderr."""

from __future__ import annotations

import sys


def can_ask() -> bool:
    """Whether a person sits at both ends: never in a pipe, a script's redirection or a service."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def ask(question: str) -> str | None:
    """What the person types, without spaces around it; None at the end of the input."""
    sys.stderr.write(question)
    sys.stderr.flush()
    line = sys.stdin.readline()
    return line.strip() if line else None


def confirm(question: str) -> bool:
    """Whether the person types yes; anything else is no."""
    return (ask(f"{question} [y/N] ") or "").lower() in ("y", "yes")
