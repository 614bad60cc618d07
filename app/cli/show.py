"""`quire show`: what a model is, on this machine or on the hub.

Needs no daemon: an installed model is read from the store, another one from the headers of its files where they
lie, without its weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.local_store import open_store
from app.cli.output import notice, write_json, write_text
from app.cli.remote import look_up
from app.cli.resident import JsonOption
from store.space import format_bytes

if TYPE_CHECKING:
    from app.schema.admin import ModelCardDetails
    from app.settings import Settings
    from store.remote_model import RemoteModel

_MAX_SHOWN = 80


def show(
    model: Annotated[str, typer.Argument(help="An installed model, one on the hub, or a path.")],
    modelfile: Annotated[bool, typer.Option("--modelfile", help="Print the Modelfile that makes it.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Show what a model is."""
    from app.model_task import remote_capability
    from app.settings import load_settings
    from app.translate.admin import model_card, remote_card
    from engine.pooling.config import read_pooling
    from store.errors import ModelNotFound
    from store.facts import read_model_facts
    from store.names import parse_model_name

    settings = load_settings()
    store = open_store(settings)
    remote = None
    try:
        installed = store.find(model)
        card = model_card(installed, read_model_facts(installed.path), read_pooling(installed.path))
    except ModelNotFound:
        if modelfile or parse_model_name(model).kind == "path":
            raise
        remote = look_up(model, settings, store.root)
        card = remote_card(remote, remote_capability(remote))
    if json_output:
        write_json(card)
    elif modelfile:
        write_text(card.modelfile)
    else:
        for label, value in _card_lines(card):
            write_text(f"{label:<18}{value}\n")
    if remote is not None:
        _tell_what_a_pull_does(remote, settings)


def _tell_what_a_pull_does(remote: RemoteModel, settings: Settings) -> None:
    """How large the download is, and whether the model can run here."""
    from app.residency.advice.acceptance import accept, host_of
    from app.residency.devices import measure
    from store.errors import StoreError

    plan = remote.plan
    notice(f"Not installed; get it with `quire pull {plan.wanted.name}` ({format_bytes(plan.needed_bytes)} to fetch).")
    try:
        remark = accept(remote.facts, host_of(settings, measure(settings.device)))
    except StoreError as error:
        remark = error.message
    if remark:
        notice(remark)


def _card_lines(card: ModelCardDetails) -> list[tuple[str, str]]:
    details = card.details
    defaults = ", ".join(f"{name} {_shown(value)}" for name, value in card.sampling_defaults.items())
    lines = [
        ("name", card.name),
        ("made from", card.base),
        ("architecture", details.family),
        ("parameters", details.parameter_size),
        ("quantization", details.quantization_level),
        ("context length", f"{details.context_length:,}" if details.context_length else None),
        ("embedding length", f"{details.embedding_length:,}" if details.embedding_length else None),
        ("layers", str(details.num_layers) if details.num_layers else None),
        ("does", ", ".join(card.capabilities)),
        *_pooling_lines(card),
        ("chat template", _yes_or_no(card) if "completion" in card.capabilities else None),
        ("sampling", defaults or None),
        ("system", _first_line(card.system)),
        ("license", _first_line(card.license)),
        ("weights", format_bytes(card.memory.weight_bytes)),
        ("KV cache", _cache_need(card)),
        ("size" if card.installed else "download size", format_bytes(card.size)),
        ("source", card.source),
        ("path", card.path),
    ]
    return [(label, value) for label, value in lines if value is not None]


def _pooling_lines(card: ModelCardDetails) -> list[tuple[str, str | None]]:
    """How an embedding model or a reranker takes texts."""
    pooling = card.pooling
    if pooling is None:
        return []
    return [
        ("pooling", pooling.mode if "embedding" in card.capabilities else None),
        ("longest text", f"{pooling.max_tokens:,} tokens" if pooling.max_tokens else None),
        ("prompts", ", ".join(pooling.prompts) or None),
    ]


def _yes_or_no(card: ModelCardDetails) -> str:
    return "yes" if card.has_chat_template else "no"


def _cache_need(card: ModelCardDetails) -> str | None:
    """`28,672 bytes a token, 3.8 GB for the whole context`."""
    memory = card.memory
    if memory.kv_bytes_per_token is None:
        return None
    whole = memory.kv_bytes_full_context
    per_token = f"{memory.kv_bytes_per_token:,} bytes a token"
    if memory.has_latent_cache:
        per_token += " (one latent vector per layer, MLA)"
    return f"{per_token}, {format_bytes(whole)} for the whole context" if whole else per_token


def _shown(value: Any) -> str:
    return " ".join(repr(text) for text in value) if isinstance(value, list | tuple) else f"{value:g}"


def _first_line(text: str | None) -> str | None:
    """What fits a line of the listing; `--modelfile` and `--json` print the whole text."""
    lines = (text or "").strip().splitlines()
    if not lines:
        return None
    return lines[0] if len(lines) == 1 and len(lines[0]) <= _MAX_SHOWN else f"{lines[0][:_MAX_SHOWN]}..."
