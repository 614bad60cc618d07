"""Plain log lines on standard error: time, level, where, what.  Called once, by `app.server.serve`."""

from __future__ import annotations

import logging

OWN_PACKAGES = ("app", "engine", "store")


def configure_logging(level: str) -> None:
    """Send this process's log to standard error; libraries speak up only when something is wrong."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    for package in OWN_PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
