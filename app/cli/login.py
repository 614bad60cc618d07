"""`quire login` and `quire logout`: tokens for gated and private models.

The hub's token lies where `hf auth login` keeps it, so either tool's login serves both.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from app.cli.failure import USAGE_EXIT_CODE, CommandFailure
from app.cli.output import notice

_ANSWER_S = 10.0

HostOption = Annotated[str | None, typer.Option("--host", help="Address of a mirror; the hub unless given.")]


def login(
    token: Annotated[str | None, typer.Option(help="The token; asked for, or read from a pipe, if left out.")] = None,
    host: HostOption = None,
) -> None:
    """Keep a token for gated and private models."""
    from app.settings import load_settings
    from store.errors import HubUnreachable
    from store.hub_token import store_hub_token, store_mirror_token
    from store.paths import user_paths
    from store.sources.hub_account import account_name

    settings = load_settings()
    hub = settings.hub_endpoint.rstrip("/")
    address = _address(host) or hub
    secret = (token or _ask_token(address)).strip()
    if not secret or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise CommandFailure(f"That is not a token; copy it from {address}/settings/tokens.", exit_code=USAGE_EXIT_CODE)
    try:
        if settings.hub_offline:
            raise HubUnreachable(f"offline mode is on ({settings.origin('hub_offline')}).")
        account = f"You are {account_name(address, secret, _ANSWER_S)} at {address}."
    except HubUnreachable as error:
        account = f"The token was not checked: {error.reason}."
    if address == hub:
        path = store_hub_token(secret)
    else:
        path = store_mirror_token(user_paths().config_dir, address, secret)
    notice(f"{account} The token is in {path}.")
    if address == hub and settings.hub_token and settings.hub_token != secret:
        notice(f"Another token counts before it: hub_token ({settings.origin('hub_token')}).")


def logout(host: HostOption = None) -> None:
    """Forget a token."""
    from app.settings import load_settings
    from store.hub_token import forget_hub_token, forget_mirror_token
    from store.paths import user_paths

    settings = load_settings()
    hub = settings.hub_endpoint.rstrip("/")
    address = _address(host) or hub
    known = forget_hub_token() if address == hub else forget_mirror_token(user_paths().config_dir, address)
    notice(f"The token for {address} is forgotten." if known else f"No token for {address} is kept here.")
    if address == hub and settings.hub_token:
        notice(f"A token still comes from hub_token ({settings.origin('hub_token')}).")


def _address(host: str | None) -> str | None:
    """`mirror.example` → `https://mirror.example`."""
    if host is None:
        return None
    address = host.strip().rstrip("/")
    return address if "://" in address else f"https://{address}"


def _ask_token(address: str) -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    notice(f"Make a token at {address}/settings/tokens, and paste it here; it is not shown.")
    return str(typer.prompt("Token", hide_input=True, err=True))
