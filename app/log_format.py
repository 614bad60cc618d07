"""Plain log lines on standard error: time, level, where, what.  Called once, by `app.server.serve`."""

from __future__ import annotations

import logging


def configure_logging(level: str) -> None:
    """Send this process's log to standard error; the libraries speak up only when something is wrong."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    for library in ("uvicorn.access", "uvicorn.error", "httpx", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)
