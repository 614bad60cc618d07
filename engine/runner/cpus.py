"""Which CPUs compute: what this process may use, counted in cores.

A container's share may be a set of CPUs, a quota of time, or both; two hardware threads of one core have
one unit for vector arithmetic between them, so each core gets one thread.  Linux tells all of that; elsewhere
the number of cores is taken.  Called when an engine is built on a CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class CpuShare:
    """`cores`: one CPU of each core this process may run on; `quota`: CPUs' worth of time it gets, None: no limit."""

    cores: tuple[int, ...]
    quota: float | None

    @property
    def threads(self) -> int:
        """How many threads can compute at once without waiting for one another's time."""
        return max(1, len(self.cores) if self.quota is None else min(len(self.cores), int(self.quota)))


def cpu_share() -> CpuShare:
    """This process's share of the machine."""
    if not hasattr(os, "sched_getaffinity"):
        import psutil

        return CpuShare(tuple(range(psutil.cpu_count(logical=False) or os.cpu_count() or 1)), None)
    return CpuShare(one_per_core(sorted(os.sched_getaffinity(0)), _CPUS), cgroup_quota(_CGROUP, _own_cgroup()))


def one_per_core(cpus: list[int], folder: Path) -> tuple[int, ...]:
    """The first of the `cpus` of every core; all of them where the kernel (`folder`) does not tell."""
    first_of: dict[str, int] = {}
    for cpu in cpus:
        siblings = _read(folder / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        first_of.setdefault(siblings or f"cpu {cpu}", cpu)
    return tuple(first_of.values())


def cgroup_quota(root: Path, own: str) -> float | None:
    """CPUs' worth of time that the control group `own`, or one above it, allows; None: as much as there is."""
    found: list[float] = []
    group = root / own.lstrip("/")
    while group == root or root in group.parents:
        found += _quota_of(_read(group / "cpu.max").split())
        limits = (_read(group / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        found += _quota_of(list(limits))
        group = group.parent
    return min(found, default=None)


def _quota_of(limits: list[str]) -> list[float]:
    """[quota / period] of the two numbers, both in microseconds; nothing where there is no limit."""
    try:
        quota, period = (int(limit) for limit in limits)
    except ValueError:
        return []
    return [quota / period] if quota > 0 and period > 0 else []


def _own_cgroup() -> str:
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::")
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
