"""`quire recommend`: which models fit this machine, and the arithmetic that says so.

Needs no daemon and asks nobody.  The ranking is in `app.residency.advice.recommend`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.cli.discover import installed_names, is_installed
from app.cli.failure import USAGE_EXIT_CODE, CommandFailure
from app.cli.local_store import open_store
from app.cli.output import notice, write_json, write_table
from app.cli.resident import JsonOption
from store.space import format_bytes

if TYPE_CHECKING:
    from app.residency.advice.recommend import Need, Purpose
    from app.residency.arithmetic.footprint import Host
    from app.settings import Settings
    from store.catalog import CatalogModel

MOST_SHOWN = 8
_POOLED = ("embed", "rerank")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|g|mib|mb|m)?", re.IGNORECASE)
_MEMORY_UNITS = {"": 2**30, "g": 2**30, "gib": 2**30, "gb": 10**9, "m": 2**20, "mib": 2**20, "mb": 10**6}


def recommend(
    purpose: Annotated[
        Literal["chat", "code", "reasoning", "embed", "rerank"], typer.Option("--for", help="What it is wanted for.")
    ] = "chat",
    memory: Annotated[str | None, typer.Option(help="So much memory instead of this machine's, such as 24GiB.")] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(help="In RAM or on a GPU; default: the setting.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show which models fit this machine, the best first."""
    from app.settings import load_settings

    settings = load_settings()
    host = measured_host(settings, memory, device)
    needs = _recommended(settings, host, purpose)
    if json_output:
        installed = installed_names(open_store(settings))
        write_json(_as_json(host, [(need, is_installed(need.model, installed)) for need in needs]))
        return
    notice(_device_sentence(host, is_assumed=memory is not None))
    if not needs:
        is_pooled = purpose in _POOLED
        advice = f"`quire search {purpose}` shows them all" if is_pooled else "`quire run starter` needs the least"
        raise CommandFailure(f"No {purpose} model of the catalogue fits in that; {advice}.")
    installed = installed_names(open_store(settings))
    _show(needs, installed)
    _tell(settings, host, purpose, needs)
    typer.echo(f"Best: {_command(needs[0].model)}")


def _command(model: CatalogModel) -> str:
    """What to type; who wants a reranker or an embedding model asks it from a program."""
    return f"quire {'pull' if model.kind in _POOLED else 'run'} {model.name}"


def recommended_name(settings: Settings) -> str | None:
    """The best chat model for this machine, if any fits."""
    needs = _recommended(settings, measured_host(settings, None, None), "chat")
    return needs[0].model.name if needs else None


def measured_host(settings: Settings, memory: str | None, device: str | None) -> Host:
    """The device that models would run on; `memory` is assumed in place of what it has."""
    from app.residency.advice.acceptance import host_of
    from app.residency.arithmetic.memory import DeviceMemory
    from app.residency.devices import measure

    assumed_bytes = parse_memory(memory) if memory is not None else None
    found = measure(device or settings.device)
    if assumed_bytes is not None:
        name = {"cpu": "cpu", "cuda": "cuda:0"}.get(device or "", found.device)
        return host_of(settings, DeviceMemory(name, assumed_bytes, 0))
    if device == "cuda" and found.device == "cpu":
        raise CommandFailure("This machine has no GPU that can be used; name its memory, such as `--memory 24GiB`.")
    return host_of(settings, found)


def parse_memory(text: str) -> int:
    """`24GiB`, `24` → 25,769,803,776 bytes; `24GB` → 24,000,000,000.  Memory is sold in binary units."""
    match = _MEMORY.fullmatch(text.strip())
    size_bytes = int(float(match[1]) * _MEMORY_UNITS[(match[2] or "").lower()]) if match else 0
    if size_bytes < 1:
        raise CommandFailure(f"{text!r} is not a size of memory; write it like 24GiB.", exit_code=USAGE_EXIT_CODE)
    return size_bytes


def _recommended(settings: Settings, host: Host, purpose: Purpose, max_num_seqs: int | None = None) -> list[Need]:
    from app.residency.advice.recommend import recommend as rank
    from store.catalog import distinct_models

    return rank(distinct_models(), host, purpose, max_num_seqs or settings.max_num_seqs)


def _device_sentence(host: Host, *, is_assumed: bool) -> str:
    memory = host.memory
    share = f"Quire may take {format_bytes(host.usable_bytes)} of it (memory_limit {host.utilization:g})"
    what = "A GPU" if memory.device.startswith("cuda") else "RAM"
    if is_assumed:
        return f"{what} of {format_bytes(memory.total_bytes)}: {share}."
    what = f"The GPU {memory.device}" if memory.device.startswith("cuda") else "RAM"
    return f"{what} has {format_bytes(memory.total_bytes)}: {share}; {format_bytes(memory.used_bytes)} are in use now."


def _show(needs: list[Need], installed: frozenset[str]) -> None:
    rows = []
    for need in needs[:MOST_SHOWN]:
        state = "installed" if is_installed(need.model, installed) else "needs a login" if need.model.gated else ""
        rows.append(
            (
                need.model.name,
                format_bytes(need.weight_bytes),
                format_bytes(need.cache_bytes),
                format_bytes(need.working_bytes),
                format_bytes(need.total_bytes),
                need.model.license,
                state,
                need.model.good_for,
            )
        )
    write_table(("MODEL", "WEIGHTS", "+ CACHE", "+ WORK", "= NEEDS", "LICENSE", "", "GOOD FOR"), rows, may_cut=True)
    if len(needs) > MOST_SHOWN:
        notice(f"and {len(needs) - MOST_SHOWN} smaller ones (`--json` lists all).")


def _tell(settings: Settings, host: Host, purpose: Purpose, needs: list[Need]) -> None:
    """The arithmetic of the best one, and what would change the answer."""
    best = needs[0]
    notice(_why(best, host))
    free_bytes = host.usable_bytes - host.memory.used_bytes
    if best.total_bytes > free_bytes:
        fitting = next((need.model.name for need in needs if need.total_bytes <= free_bytes), None)
        now = f"`quire run {fitting}` fits in that" if fitting else "stop what takes the rest first"
        notice(f"At this moment only {format_bytes(max(0, free_bytes))} of that is free; {now}.")
    if further := _with_fewer_requests(settings, host, purpose, best):
        notice(further)
    if left_out := _left_out(host, purpose):
        notice(f"Not run by this version, and so left out: {', '.join(left_out)}.")


def _why(need: Need, host: Host) -> str:
    """How the needs of a model come about, in figures."""
    model = need.model
    weights = f"{format_bytes(need.weight_bytes)} for {model.parameters:,} parameters"
    if model.quantization and host.memory.device == "cpu" and host.quantization != "none":
        weights += f" in {model.quantization}"
    cache = ""
    if model.kv_heads and model.head_dim:
        cache = (
            f"; the cache is 2 (keys and values) x {model.layers} layers x {model.kv_heads} heads x {model.head_dim} "
            f"x 2 bytes for each of {need.context:,} tokens"
        )
    limit = ""
    if host.memory.device == "cpu":
        limit = "  In RAM weights may take about a third; each token reads them all, so a smaller model is faster."
    return f"{model.name} is the largest that fits: {weights}{cache}; the rest is what a step works in.{limit}"


def _with_fewer_requests(settings: Settings, host: Host, purpose: Purpose, best: Need) -> str | None:
    """A larger model that fits a GPU which serves few requests at once."""
    from app.residency.advice.recommend import FEW_SEQUENCES

    if settings.max_num_seqs is not None:
        return None
    with_few = _recommended(settings, host, purpose, FEW_SEQUENCES)
    if not with_few or with_few[0].model.parameters <= best.model.parameters:
        return None
    name = with_few[0].model.name
    return f"With `max_num_seqs = {FEW_SEQUENCES}`, enough for one person, {name} fits too."


def _left_out(host: Host, purpose: Purpose) -> list[str]:
    """Families of the catalogue, or single models of a family, that the engine does not run."""
    from app.residency.advice.recommend import suited, why_not_run
    from store.catalog import distinct_models

    models = suited(distinct_models(), host, purpose)
    running = {_family(model.name) for model in models if why_not_run(model) is None}
    others = [model.name for model in models if why_not_run(model)]
    return sorted({name if _family(name) in running else _family(name) for name in others})


def _family(name: str) -> str:
    return name.partition(":")[0]


def _as_json(host: Host, needs: list[tuple[Need, bool]]) -> dict[str, Any]:
    return {
        "device": host.memory.device,
        "total": host.memory.total_bytes,
        "usable": host.usable_bytes,
        "used": host.memory.used_bytes,
        "models": [
            {
                "name": need.model.name,
                "repo": need.model.hub.repo,
                "weights": need.weight_bytes,
                "cache": need.cache_bytes,
                "working": need.working_bytes,
                "needed": need.total_bytes,
                "context": need.context,
                "license": need.model.license,
                "gated": need.model.gated,
                "good_for": need.model.good_for,
                "installed": is_here,
                "command": _command(need.model),
            }
            for need, is_here in needs
        ],
    }
