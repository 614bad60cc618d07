"""`quire plan`: where a device's memory would go, before anything is downloaded.

Needs no daemon and no GPU: the facts come from installed files, a path, the catalogue, or headers on the hub.  The
arithmetic is in `app.residency.advice.plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli.failure import USAGE_EXIT_CODE, CommandFailure
from app.cli.output import write_json
from app.cli.plan_view import plan_as_json, show_plan
from app.cli.recommend import parse_memory
from app.cli.remote import look_up
from app.cli.resident import JsonOption

if TYPE_CHECKING:
    from app.residency.arithmetic.tenants import DeviceShare
    from app.settings import Settings
    from store.facts import ModelFacts


@dataclass(frozen=True, slots=True)
class _Found:
    """A model's facts; `is_estimate`: no weights were read."""

    name: str
    facts: ModelFacts
    share: float | None
    is_estimate: bool


def plan(
    model: Annotated[str, typer.Argument(help="A model, or a path, also of a config.json; or NAME=SHARE.")],
    memory: Annotated[
        str | None, typer.Option(help="A GPU of so much memory, such as 24GiB, not this machine's.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(help="In RAM or on a GPU; default: the setting.")
    ] = None,
    utilization: Annotated[float | None, typer.Option(help="The model's share of the device, such as 0.9.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Tokens one request may take.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences computed at once.")] = None,
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"], typer.Option(help="Type of keys and values.")
    ] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens of a block: 16, 32 or 64.")] = 16,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="A KV cache of so many blocks, whatever that takes.")
    ] = None,
    others: Annotated[
        list[str] | None, typer.Option("--with", metavar="OTHER[=SHARE]", help="A model beside it; repeatable.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show what a model would take of a device's memory, and how many requests fit."""
    from app.residency.advice.plan import Options, Wish, plan_device
    from app.settings import load_settings

    _check(block_size, utilization)
    settings = load_settings()
    found = [_find(text, settings) for text in (model, *(others or ()))]
    shares = [utilization or found[0].share, *(one.share for one in found[1:])]
    target = _device(settings, memory, device, shares)
    options = Options(
        quantization=settings.quantization,
        max_model_len=max_model_len or settings.max_model_len,
        max_num_seqs=max_num_seqs or settings.max_num_seqs,
        block_size=block_size,
        cache_type=kv_cache_dtype,
        num_blocks=blocks,
    )
    wishes = [Wish(one.name, one.facts, share) for one, share in zip(found, shares, strict=True)]
    planned = plan_device(wishes, target, options)
    if json_output:
        write_json(plan_as_json(planned, is_estimate=found[0].is_estimate))
    else:
        show_plan(planned, settings.memory_limit, is_estimate=found[0].is_estimate)
    if not planned.fits:
        raise typer.Exit(1)


def _check(block_size: int, utilization: float | None) -> None:
    from engine.api.config import BLOCK_SIZES

    if block_size not in BLOCK_SIZES:
        raise CommandFailure(f"A block has 16, 32 or 64 tokens, not {block_size}.", exit_code=USAGE_EXIT_CODE)
    if utilization is not None and not 0.0 < utilization <= 1.0:
        raise CommandFailure(
            f"--utilization {utilization:g} is no share of the memory; give a fraction above 0 and at most 1.",
            exit_code=USAGE_EXIT_CODE,
        )


def _find(text: str, settings: Settings) -> _Found:
    """The facts of `NAME` or `NAME=SHARE`: of a path, an installed model, the catalogue or the hub, in this order."""
    from app.cli.local_store import open_store
    from app.residency_settings import resident_of_text
    from store.catalog import catalog_models
    from store.catalog_facts import catalog_facts
    from store.errors import ModelNotFound
    from store.names import parse_model_name

    if Path(text).expanduser().exists():
        return _find_path(Path(text).expanduser(), None)
    wish = resident_of_text(text, "command line")
    path = Path(wish.model).expanduser()
    if path.exists():
        return _find_path(path, wish.share)
    parsed = parse_model_name(wish.model)
    store = open_store(settings)
    try:
        installed = store.find(wish.model)
        return _Found(installed.name, _facts(installed.path), wish.share, is_estimate=False)
    except ModelNotFound:
        if parsed.kind == "path":
            raise
    known = catalog_models().get(parsed.text)
    if known is not None:
        return _Found(known.name, catalog_facts(known), wish.share, is_estimate=False)
    remote = look_up(wish.model, settings, store.root)
    return _Found(remote.plan.wanted.name, remote.facts, wish.share, is_estimate=False)


def _find_path(path: Path, share: float | None) -> _Found:
    """A model's files, or a config.json without any."""
    from store.facts import facts_of_checkpoint
    from store.formats.json_object import read_json_file

    name = path.resolve().parent.name if path.name == "config.json" else path.resolve().name
    config = path / "config.json" if path.is_dir() else path
    is_bare = config.suffix == ".json" and not (path.is_dir() and any(path.glob("*.safetensors")))
    if not is_bare or not config.is_file():
        return _Found(name, _facts(path), share, is_estimate=False)
    facts = facts_of_checkpoint(read_json_file(config), (), has_chat_template=False)
    return _Found(name, facts, share, is_estimate=True)


def _facts(path: Path) -> ModelFacts:
    """Of files; an embedding model's texts may be shorter than what it has positions for."""
    import msgspec

    from engine.api.errors import UnsupportedModel
    from engine.pooling.config import read_pooling
    from store.facts import read_model_facts

    facts = read_model_facts(path)
    try:
        pooling = read_pooling(path)
    except UnsupportedModel:
        return facts  # the plan says itself what this version does not run
    longest = pooling.max_length if pooling is not None else None
    return facts if longest is None else msgspec.structs.replace(facts, context_length=longest)


def _device(settings: Settings, memory: str | None, device: str | None, shares: list[float | None]) -> DeviceShare:
    """The device to plan for: this machine's, or one of so much memory."""
    from app.residency.arithmetic.tenants import DeviceShare
    from app.residency.devices import measure

    # A share beyond the limit is planned all the same; a sentence says that the daemon would refuse it.
    limit = max([settings.memory_limit, *(share for share in shares if share)])
    if memory is not None:
        return DeviceShare("cpu" if device == "cpu" else "cuda:0", parse_memory(memory), 0, limit)
    found = measure(device or settings.device)
    if device == "cuda" and found.device == "cpu":
        raise CommandFailure("This machine has no GPU that can be used; name its memory, such as `--memory 24GiB`.")
    return DeviceShare(found.device, found.total_bytes, 0, limit)
