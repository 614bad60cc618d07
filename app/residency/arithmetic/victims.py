"""Which idle models make room: the least valuable ones, and no more of them than it takes.

Pure arithmetic; called by `app.residency.arithmetic.placement`.  The value of a model is what being without it will
probably cost: the seconds that loading it again takes, over the seconds since it was last used (as GreedyDual
does for caches, https://www.usenix.org/legacy/publications/library/proceedings/usits97/full_papers/cao/cao.pdf
§4).  Of models that load equally fast it is the least recently used that goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from app.residency.arithmetic.tenants import Tenant

_LEAST_LOAD_S = 0.5
"""A load takes this long at least, also where none was measured."""


def keep_value(tenant: Tenant, now: float) -> float:
    """Seconds of loading that keeping a model saves, for each second that it goes on being unused."""
    return max(tenant.load_seconds, _LEAST_LOAD_S) / max(tenant.idle_s(now), 1.0)


def may_leave(tenant: Tenant) -> bool:
    """Whether a model may be put to sleep or unloaded for another."""
    return not tenant.is_pinned and not tenant.is_busy and tenant.state != "loading"


def choose_victims(
    candidates: Iterable[Tenant], missing_bytes: int, freed_bytes: Callable[[Tenant], int], now: float
) -> list[Tenant] | None:
    """Models whose leaving frees `missing_bytes`, the least valuable first; None if all together do not.

    None of them could stay, nor be exchanged for a less valuable one that frees as much.
    """
    ordered = sorted(candidates, key=lambda tenant: (keep_value(tenant, now), tenant.num_uses, tenant.name))
    chosen: list[Tenant] = []
    for tenant in ordered:
        if missing_bytes <= 0:
            break
        if freed_bytes(tenant) > 0:
            chosen.append(tenant)
            missing_bytes -= freed_bytes(tenant)
    return None if missing_bytes > 0 else _without_needless(chosen, -missing_bytes, freed_bytes)


def choose_sleepers(victims: Sequence[Tenant], slack_bytes: int, host_free_bytes: int, now: float) -> frozenset[str]:
    """The victims that sleep rather than being unloaded: those worth most, where host memory has room for them.

    `slack_bytes` is what all of them free beyond what is missing, from which comes what a sleeper still holds.
    """
    sleepers: set[str] = set()
    for tenant in sorted(victims, key=lambda tenant: keep_value(tenant, now), reverse=True):
        can_sleep = tenant.can_sleep and tenant.state == "awake"
        if can_sleep and tenant.weight_bytes <= host_free_bytes and tenant.held_asleep_bytes <= slack_bytes:
            host_free_bytes -= tenant.weight_bytes
            slack_bytes -= tenant.held_asleep_bytes
            sleepers.add(tenant.name)
    return frozenset(sleepers)


def _without_needless(chosen: list[Tenant], slack_bytes: int, freed_bytes: Callable[[Tenant], int]) -> list[Tenant]:
    """Let those stay, the most valuable first, without whom the others free enough."""
    kept = []
    for tenant in reversed(chosen):
        if freed_bytes(tenant) <= slack_bytes:
            slack_bytes -= freed_bytes(tenant)
        else:
            kept.append(tenant)
    return kept[::-1]
