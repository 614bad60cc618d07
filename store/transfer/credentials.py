"""Which token goes to which host, and that it goes nowhere else.

Built by `pull` from the settings; asked once for every request by the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

import httpx


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


def origin_of(url: str | httpx.URL) -> str:
    """`scheme://host:port` of an address, the default port left out.  Raises httpx.InvalidURL."""
    parts = httpx.URL(url)
    host = f"[{parts.host}]" if ":" in parts.host else parts.host
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port is not None else "")
