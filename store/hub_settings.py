"""`HubSettings`: where models may be fetched from, resolved once.

Built by `app.settings` from its own sources or by `HubSettings.from_environment` for offline use
of the library.  Knows nothing of requests; read by `pull` and the sources.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from store.paths import hub_token_path

DEFAULT_ENDPOINT = "https://huggingface.co"
_TRUE_WORDS = frozenset({"1", "on", "yes", "true"})


@dataclass(frozen=True, slots=True)
class HubSettings:
    """`endpoints` are tried in order; `pip_command` is how the package index is asked."""

    endpoints: tuple[str, ...] = (DEFAULT_ENDPOINT,)
    offline: bool = False
    token: str | None = None
    pip_command: tuple[str, ...] = (sys.executable, "-m", "pip")

    def __post_init__(self) -> None:
        object.__setattr__(self, "endpoints", tuple(endpoint.rstrip("/") for endpoint in self.endpoints))

    def __repr__(self) -> str:
        return f"HubSettings(endpoints={self.endpoints}, offline={self.offline}, token={'***' if self.token else None})"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Honour `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_TOKEN` and the token that `hf auth login` stored."""
        return cls(
            endpoints=(environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT,),
            offline=is_offline(environ),
            token=stored_token(environ),
        )


def is_offline(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `HF_HUB_OFFLINE` is set to a true word."""
    return environ.get("HF_HUB_OFFLINE", "").strip().lower() in _TRUE_WORDS


def stored_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """`HF_TOKEN`, else the content of the token file, else None."""
    token = environ.get("HF_TOKEN", "").strip()
    if not token:
        try:
            token = hub_token_path(environ).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
    return token or None
