"""`quire pull --dry-run`: asks the sources itself, without a daemon, and shows what a pull would fetch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.cli.output import notice, write_json, write_table
from store.space import format_bytes

if TYPE_CHECKING:
    from app.settings import Settings
    from store.paths import DataRoot
    from store.plan import PullPlan


def show_pull_plan(settings: Settings, name: str, *, is_offline: bool, json_output: bool) -> None:
    """Show the plan of a pull; fails if the disk cannot take it."""
    from app.hub import hub_settings
    from store.paths import DataRoot
    from store.plan import plan_pull

    root = DataRoot.look(settings.data_root)
    hub = hub_settings(settings, is_offline=is_offline)
    plan = plan_pull(name, root, hub, lambda progress: notice(progress.status), lambda: False)
    if json_output:
        write_json(_plan_as_json(plan, root))
    else:
        _show_plan(plan, root)
    plan.require_space(root)


def _show_plan(plan: PullPlan, root: DataRoot) -> None:
    rows = []
    for file in plan.files:
        state = "here" if file.is_present else f"{format_bytes(file.partial_bytes)} here" if file.partial_bytes else ""
        rows.append((file.path, format_bytes(file.size_bytes), format_bytes(file.needed_bytes), state))
    if rows:
        write_table(("FILE", "SIZE", "TO FETCH", ""), rows)
    source = f"from {plan.endpoints[0]}" if plan.endpoints else ""
    commit = plan.commit[:12]
    version = commit if str(plan.revision) == str(plan.commit) else f"{plan.revision} ({commit})"
    notice(f"{plan.wanted.name} at {version} {source}")
    if not rows:
        notice("What the package holds and how large it is shows once it is here.")
    for need in plan.space_needs(root):
        fetch = f"{format_bytes(need.needed_bytes)} to fetch of {format_bytes(plan.total_bytes)}; " if rows else ""
        notice(f"{fetch}{format_bytes(need.free_bytes)} free in {need.directory}")


def _plan_as_json(plan: PullPlan, root: DataRoot) -> dict[str, Any]:
    files = [
        {
            "path": str(file.path),
            "size": file.size_bytes,
            "digest": str(file.remote.digest) if file.remote.digest else None,
            "present": file.is_present,
            "partial": file.partial_bytes,
            "needed": file.needed_bytes,
        }
        for file in plan.files
    ]
    return {
        "name": plan.wanted.name,
        "repo": str(plan.wanted.repo),
        "revision": str(plan.revision),
        "commit": str(plan.commit),
        "source": plan.source,
        "endpoints": list(plan.endpoints),
        "license": plan.license,
        "files": files,
        "size": plan.total_bytes,
        "needed": plan.needed_bytes,
        "disks": [
            {"directory": str(need.directory), "needed": need.needed_bytes, "free": need.free_bytes}
            for need in plan.space_needs(root)
        ],
    }
