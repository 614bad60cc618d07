"""`quire search`: models by their words, in the catalogue and on the hub.

Needs no daemon.  `quire recommend` is in `app.cli.recommend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.failure import USAGE_EXIT_CODE, CommandFailure
from app.cli.local_store import open_store
from app.cli.output import notice, write_json, write_table
from app.cli.pull import OfflineOption
from app.cli.resident import JsonOption
from store.space import format_bytes

if TYPE_CHECKING:
    from app.settings import Settings
    from store.catalog import CatalogModel
    from store.models import ModelStore
    from store.sources.hub_search import FoundModel, SearchAnswer

UNKNOWN = "-"
_MOST_LISTED = 4


def search(
    words: Annotated[list[str], typer.Argument(metavar="WORD...", help="Of a name or a purpose, such as: qwen code")],
    limit: Annotated[int, typer.Option(min=1, max=100, help="Most models of the hub.")] = 20,
    offline: OfflineOption = False,
    json_output: JsonOption = False,
) -> None:
    """Find models, in the catalogue first and then on the hub."""
    from app.settings import load_settings
    from store.catalog import search_catalog

    text = " ".join(" ".join(words).split())
    if not text:
        raise CommandFailure("The word to search for is empty; write one.", exit_code=USAGE_EXIT_CODE)
    if text.startswith("ms:"):
        raise CommandFailure("ModelScope cannot be searched from here; look at https://www.modelscope.cn/models.")
    settings = load_settings()
    installed = installed_names(open_store(settings))
    models = search_catalog(text)
    answer, problem = _ask_hub(settings, text, limit, is_offline=offline)
    found = answer.models if answer else ()
    if json_output:
        write_json(
            {
                "catalog": [_catalog_entry(model, installed) for model in models],
                "hub": [_hub_entry(model, installed) for model in found],
                "endpoint": answer.endpoint if answer else None,
                "problem": problem,
            }
        )
        return
    _show(models, answer, installed)
    for remark in _why_not(models):
        notice(remark)
    if problem:
        notice(problem)
    if not models and not found:
        raise CommandFailure(f"Nothing is called {text}; try a part of the name, or name a repository in full.")


def installed_names(store: ModelStore) -> frozenset[str]:
    """Names of the installed models, and what they stand for on the hub, in lower case."""
    names = {model.name.casefold() for model in store.list()}
    pulled = [manifest for _, manifest in store.manifests() if store.installed(manifest)]
    return frozenset(names | {manifest.reference.casefold() for manifest in pulled})


def is_installed(model: CatalogModel, installed: frozenset[str]) -> bool:
    """Whether a model of the catalogue is here, under whichever name."""
    from store.models import hub_reference
    from store.names import parse_model_name

    reference = hub_reference(parse_model_name(model.name)).casefold()
    return model.name in installed or reference in installed


def _ask_hub(settings: Settings, words: str, limit: int, *, is_offline: bool) -> tuple[SearchAnswer | None, str | None]:
    """What the hub finds, or a sentence why it was not asked."""
    from app.hub import hub_settings
    from store.errors import HubUnreachable
    from store.progress import Reporter
    from store.sources.lookup import search_hub

    hub = hub_settings(settings, is_offline=is_offline)
    if hub.offline:
        return None, "Offline: only the catalogue was searched, not the hub."
    try:
        return search_hub(hub, words, limit, Reporter(lambda _: None, lambda: False)), None
    except HubUnreachable as error:
        return None, f"Only the catalogue was searched: {error.message[:1].lower()}{error.message[1:]}"


def _show(models: list[CatalogModel], answer: SearchAnswer | None, installed: frozenset[str]) -> None:
    if models:
        rows = [_catalog_row(model, installed) for model in models]
        write_table(("NAME", "PARAMETERS", "SIZE", "KIND", "RUNS", "", "GOOD FOR"), rows, may_cut=True)
    if answer is None or not answer.models:
        return
    typer.echo(f"\nOn the hub ({answer.endpoint}):" if models else f"On the hub ({answer.endpoint}):")
    rows = [_hub_row(model, installed) for model in answer.models]
    write_table(("REPOSITORY", "PARAMETERS", "SIZE", "DOWNLOADS", "RUNS", ""), rows)


def _why_not(models: list[CatalogModel]) -> list[str]:
    """A sentence for each reason why some of the models do not run."""
    from app.residency.advice.recommend import why_not_run

    names_by_reason: dict[str, list[str]] = {}
    for model in models:
        if reason := why_not_run(model):
            names_by_reason.setdefault(reason.partition(";")[0], []).append(model.name)
    return [f"{_listed(names)}: {reason}." for reason, names in names_by_reason.items()]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


def _catalog_row(model: CatalogModel, installed: frozenset[str]) -> tuple[str, ...]:
    from app.residency.advice.recommend import why_not_run
    from store.catalog_facts import stored_bytes

    return (
        model.name,
        format_count(model.parameters),
        format_bytes(stored_bytes(model)),
        model.kind,
        "no" if why_not_run(model) else "yes",
        _remark(is_here=is_installed(model, installed), is_gated=model.gated),
        model.good_for,
    )


def _hub_row(model: FoundModel, installed: frozenset[str]) -> tuple[str, ...]:
    runs = _runs(model)
    return (
        str(model.repo),
        format_count(model.parameters) if model.parameters else UNKNOWN,
        "GGUF" if model.is_gguf else format_bytes(model.stored_bytes) if model.stored_bytes else UNKNOWN,
        f"{model.downloads:,}" if model.downloads is not None else UNKNOWN,
        UNKNOWN if runs is None else "yes" if runs else "no",
        _remark(is_here=_is_here(model, installed), is_gated=model.gated),
    )


def _remark(*, is_here: bool, is_gated: bool) -> str:
    return "installed" if is_here else "needs a login" if is_gated else ""


def _is_here(model: FoundModel, installed: frozenset[str]) -> bool:
    """Whether anything of a repository is here: the whole, a revision, or one of its quantisations."""
    repo = model.repo.casefold()
    return any(name == repo or name.startswith((f"{repo}:", f"{repo}@")) for name in installed)


def _runs(model: FoundModel) -> bool | None:
    """Whether the engine runs a repository's model, as far as the hub's answer tells; None where it does not."""
    from engine.api.architectures import unsupported_architecture, unsupported_quantization

    if model.model_type is None:
        return None
    reasons = (
        unsupported_architecture(model.model_type, model.classes),
        unsupported_quantization(is_quantized=model.is_quantized),
    )
    return not any(reasons)


def format_count(number: int) -> str:
    """8190735360 → "8.2B", 134515008 → "135M"."""
    if number >= 999_500_000:
        return f"{number / 1e9:.1f}B"
    return f"{number / 1e6:.0f}M"


def _catalog_entry(model: CatalogModel, installed: frozenset[str]) -> dict[str, Any]:
    from app.residency.advice.recommend import why_not_run
    from store.catalog_facts import stored_bytes

    return {
        "name": model.name,
        "other_names": model.other_names,
        "repo": model.hub.repo,
        "kind": model.kind,
        "parameters": model.parameters,
        "size": stored_bytes(model),
        "quantization": model.quantization,
        "context_length": model.context_length,
        "architecture": model.model_type,
        "license": model.license,
        "gated": model.gated,
        "good_for": model.good_for,
        "why_not": why_not_run(model),
        "installed": is_installed(model, installed),
    }


def _hub_entry(model: FoundModel, installed: frozenset[str]) -> dict[str, Any]:
    return {
        "repo": str(model.repo),
        "parameters": model.parameters,
        "size": model.stored_bytes,
        "format": "gguf" if model.is_gguf else "safetensors",
        "downloads": model.downloads,
        "architecture": model.model_type,
        "license": model.license,
        "gated": model.gated,
        "runs": _runs(model),
        "installed": _is_here(model, installed),
    }
