"""Which token goes to which host, and that it goes nowhere else.

Built by `pull` from the settings; asked once for every request by the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

import httpx

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Credentials:
    """`tokens` by origin, such as `https://huggingface.co`; an origin is scheme, host and port."""

    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        tokens = {origin_of(url): token for url, token in self.tokens.items()}
        object.__setattr__(self, "tokens", MappingProxyType(tokens))

    @classmethod
    def of_endpoint(cls, endpoint: str, token: str | None) -> Self:
        """`token`, if there is one, for the origin of `endpoint` alone."""
        return cls({endpoint: token} if token else {})

    def header_for(self, url: str) -> dict[str, str]:
        """The header that a request to `url` carries; empty when no token belongs to its origin."""
        token = self.tokens.get(origin_of(url))
        return {"Authorization": f"Bearer {token}"} if token else {}


def origin_of(url: str) -> str:
    """Scheme, host and port, the default port included.  Raises httpx.InvalidURL."""
    parts = httpx.URL(url)
    return f"{parts.scheme}://{parts.host}:{parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)}"
