"""`HubSettings`: where models may be fetched from, resolved once.

Built by `app.hub` from what a person chose.  Knows nothing of requests; read by `pull` and the sources.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from store.names import RepoId

DEFAULT_ENDPOINT = "https://huggingface.co"
DEFAULT_MODELSCOPE_ENDPOINT = "https://www.modelscope.cn"


@dataclass(frozen=True, slots=True)
class HubSettings:
    """`endpoints` are the hub and its mirrors, the preferred one first.

    `token` is for the first of them alone, `modelscope_token` for ModelScope; `mirror_tokens` are by the address
    they belong to.  `pip_command` is how the package index is asked.  `network_memory` is the file that
    remembers which endpoints a network does not reach; without one every lookup finds out anew.
    """

    endpoints: tuple[str, ...] = (DEFAULT_ENDPOINT,)
    offline: bool = False
    token: str | None = field(default=None, repr=False)
    mirror_tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    modelscope_endpoint: str = DEFAULT_MODELSCOPE_ENDPOINT
    modelscope_token: str | None = field(default=None, repr=False)
    pip_command: tuple[str, ...] = (sys.executable, "-m", "pip")
    network_memory: Path | None = None

    def __post_init__(self) -> None:
        unique = dict.fromkeys(endpoint.strip().rstrip("/") for endpoint in self.endpoints)
        object.__setattr__(self, "endpoints", tuple(unique))
        object.__setattr__(self, "modelscope_endpoint", self.modelscope_endpoint.strip().rstrip("/"))

    def endpoints_of(self, repo: RepoId) -> tuple[str, ...]:
        """Where a repository is looked for, the preferred place first."""
        return (self.modelscope_endpoint,) if repo.registry == "modelscope" else self.endpoints

    def token_for(self, endpoint: str) -> str | None:
        """The token that belongs to one of the endpoints."""
        if endpoint == self.modelscope_endpoint and self.modelscope_token:
            return self.modelscope_token
        if self.endpoints and endpoint == self.endpoints[0] and self.token:
            return self.token
        return self.mirror_tokens.get(endpoint)
