"""Login tokens of model hubs: where they lie, and who gets which.

The hub's own token lies where `hf auth login` keeps it, so that one login serves both tools.  Tokens
of mirrors lie in a file of ours, by the mirror's address.  Both files are readable by the user alone.
Called by `hub_settings` (reads) and `quire login` (writes).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from store.errors import DataRootUnusable
from store.paths import hub_token_path

_MIRROR_TOKENS_FILE = "hub_tokens.json"


def stored_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """`HF_TOKEN`, else the content of the token file, else None."""
    token = environ.get("HF_TOKEN", "").strip()
    if not token:
        try:
            token = hub_token_path(environ).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
    return token or None


def mirror_tokens(config_dir: Path) -> dict[str, str]:
    """Tokens by the address they belong to; a file that cannot be read counts as none."""
    try:
        return msgspec.json.decode((config_dir / _MIRROR_TOKENS_FILE).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


def store_hub_token(token: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Keep the hub's token; returns where.  Raises DataRootUnusable."""
    path = hub_token_path(environ)
    _write_private(path, token.encode())
    return path


def store_mirror_token(config_dir: Path, address: str, token: str) -> Path:
    """Keep the token of one mirror beside those of others; returns where.  Raises DataRootUnusable."""
    path = config_dir / _MIRROR_TOKENS_FILE
    _write_private(path, msgspec.json.encode(mirror_tokens(config_dir) | {address: token}))
    return path


def forget_hub_token(environ: Mapping[str, str] = os.environ) -> bool:
    """Remove the hub's token; whether there was one.  Raises DataRootUnusable."""
    path = hub_token_path(environ)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _not_writable(path, error) from error
    return True


def forget_mirror_token(config_dir: Path, address: str) -> bool:
    """Remove the token of one mirror; whether there was one.  Raises DataRootUnusable."""
    tokens = mirror_tokens(config_dir)
    if address not in tokens:
        return False
    del tokens[address]
    _write_private(config_dir / _MIRROR_TOKENS_FILE, msgspec.json.encode(tokens))
    return True


def _write_private(path: Path, content: bytes) -> None:
    """Replace a file at once; at no moment can anyone else read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _not_writable(path, error) from error


def _not_writable(path: Path, error: OSError) -> DataRootUnusable:
    reason = (error.strerror or type(error).__name__).lower()
    return DataRootUnusable(f"The token file {path} cannot be changed ({reason}); check its directory's permissions.")
