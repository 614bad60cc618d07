"""Which endpoints this network did not reach lately, so that nobody waits for a dead hub twice.

One small file, by a fingerprint of the network (default gateway, name servers) and of the endpoints,
so that a laptop that moves elsewhere begins anew.  Entries are hints that expire: a wrong one costs
one short wait, a lost file nothing.  Called by `lookup`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

_LIFETIME_S = 6 * 3600.0
_MAX_NETWORKS = 32
_MAX_FILE_BYTES = 256 * 1024
_ROUTES = Path("/proc/net/route")
_NAME_SERVERS = Path("/etc/resolv.conf")
_ANY_DESTINATION = "00000000"


class _Network(msgspec.Struct, frozen=True):
    unreached: tuple[str, ...]
    expires_at: float


class NetworkMemory:
    """The hints about one list of endpoints on the network of this moment; `path` None remembers nothing."""

    def __init__(self, path: Path | None, endpoints: Sequence[str]) -> None:
        self._path = path
        self._key = network_fingerprint(endpoints) if path else ""

    def unreached(self) -> frozenset[str]:
        """Endpoints that did not answer when another one did."""
        network = self._load().get(self._key)
        return frozenset(network.unreached) if network and network.expires_at > time.time() else frozenset()

    def remember(self, unreached: Collection[str]) -> None:
        """Keep what the last lookup found; forgets this network when everything was reached."""
        if self._path is None:
            return
        now = time.time()
        known = self._load()
        networks = {key: known[key] for key in known if key != self._key and known[key].expires_at > now}
        if unreached:
            networks[self._key] = _Network(tuple(sorted(unreached)), now + _LIFETIME_S)
        if networks == known:
            return
        newest = sorted(networks.items(), key=lambda item: item[1].expires_at)[-_MAX_NETWORKS:]
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(msgspec.json.encode(dict(newest)))
            temporary.replace(self._path)
        except OSError:
            # Only a hint: a disk that takes no write must not keep anyone from a download.
            temporary.unlink(missing_ok=True)

    def _load(self) -> dict[str, _Network]:
        try:
            if self._path is None or self._path.stat().st_size > _MAX_FILE_BYTES:
                return {}
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, _Network])
        except (OSError, msgspec.DecodeError):
            return {}


def network_fingerprint(endpoints: Sequence[str]) -> str:
    """The same for the same endpoints on the same network, as far as the system tells networks apart."""
    routes = [line.split() for line in _lines(_ROUTES)]
    gateways = [" ".join(route[:3]) for route in routes if len(route) > 2 and route[1] == _ANY_DESTINATION]
    servers = [line.strip() for line in _lines(_NAME_SERVERS) if line.startswith("nameserver")]
    text = "\n".join([*endpoints, "", *sorted(gateways), "", *servers])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
