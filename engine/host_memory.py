"""This machine's RAM as the system and a container around this process let it be used; no torch.

Called by the daemon (`app.residency.devices`) and by workers whose weights are to sleep in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
_LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")
_USAGE_FILES = ("memory.current", "memory/memory.usage_in_bytes")
_STAT_FILES = ("memory.stat", "memory/memory.stat")
_FILE_CACHE_KEYS = frozenset({"inactive_file", "active_file"})


def host_memory(cgroup: Path = CGROUP) -> tuple[int, int]:
    """Size and use in bytes: of the machine or, where that is less, of the container."""
    memory = psutil.virtual_memory()
    container = container_memory(cgroup)
    if container is not None and container[0] < memory.total:
        return container
    return int(memory.total), int(memory.total - memory.available)


def available_host_bytes(cgroup: Path = CGROUP) -> int:
    """What programs could still get without anything being swapped out; the machine may have less than a container."""
    available = int(psutil.virtual_memory().available)
    container = container_memory(cgroup)
    return available if container is None else min(available, max(0, container[0] - container[1]))


def container_memory(cgroup: Path) -> tuple[int, int] | None:
    """Limit and use of the control group in bytes; None where there is no limit.

    File pages are left out of the use: the kernel gives them back under pressure, and
    reading the weights alone would otherwise look like a full machine.
    """
    limit = _read_first(cgroup, _LIMIT_FILES)
    usage = _read_first(cgroup, _USAGE_FILES)
    if not limit.isdigit() or not usage.isdigit():
        return None
    pairs = (line.split() for line in _read_first(cgroup, _STAT_FILES).splitlines())
    file_bytes = sum(int(value) for key, value in pairs if key in _FILE_CACHE_KEYS)
    return int(limit), max(0, int(usage) - file_bytes)


def _read_first(cgroup: Path, names: Sequence[str]) -> str:
    for name in names:
        try:
            return (cgroup / name).read_text().strip()
        except OSError:
            continue
    return ""
