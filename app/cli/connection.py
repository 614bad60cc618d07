"""From a command to a client of the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.cli.failure import CommandFailure
from app.cli.output import notice

if TYPE_CHECKING:
    from app.client import QuireClient
    from app.settings import Settings

NO_DAEMON = "No daemon is running; `quire run MODEL` or `quire serve` starts one."


def open_client(settings: Settings, *, may_ask: bool = True, is_offline: bool = False) -> QuireClient:
    """A client of the running daemon, which is started in the background if there is none.

    At the first start a person at a terminal is asked where models shall go, if `may_ask`.
    With `is_offline` its pulls touch no network; so they do where this command's settings say it, since a daemon
    that was started elsewhere does not know them.
    """
    from app.cli.first_run import settle_data_root
    from app.client import QuireClient
    from app.daemon import ensure_daemon, running_daemon
    from app.version import VERSION

    address = running_daemon(settings) or ensure_daemon(settle_data_root(settings, may_ask=may_ask), notice)
    if address.version not in (None, VERSION):
        notice(
            f"The running daemon is version {address.version}, this is {VERSION}; `quire shutdown` ends it, and the "
            "next command starts the new one."
        )
    return QuireClient(address.base_url, settings.api_key, is_offline=is_offline or settings.hub_offline)


def find_client(settings: Settings) -> QuireClient | None:
    """A client of the running daemon, or None if there is none."""
    from app.daemon import running_daemon

    address = running_daemon(settings)
    if address is None:
        return None
    from app.client import QuireClient

    return QuireClient(address.base_url, settings.api_key)


def require_client(settings: Settings) -> QuireClient:
    """A client of the running daemon; the command fails if there is none."""
    client = find_client(settings)
    if client is None:
        raise CommandFailure(NO_DAEMON)
    return client
