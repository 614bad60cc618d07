"""The catalogue of short names that ships with the product (`catalog.toml` beside this file).

Says where a model comes from, in which order, what its bytes must be, what it is and what it is good for.
Knows nothing of what is installed, nor what the engine runs, and does no I/O beyond reading its own data file
once.  Called by `names` (canonical aliases), `pull` (sources), `models` (finding an alias by its repository),
`catalog_facts`, `quire search` and `quire recommend`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any, Literal

import msgspec

Kind = Literal["chat", "code", "reasoning", "base", "embed", "rerank"]
"""What a model is made for.  `code` and `reasoning` models chat too; `base` models only continue a text."""

_BYTES_PER_GB = 10**9
_KIND_WORDS = {"code": "coder coding programming", "embed": "embedding", "rerank": "reranker", "reasoning": "thinking"}


class HubSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A repository of the model hub; `revision` is a full commit when the model is pinned."""

    repo: str
    revision: str | None = None


class PackageSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One member of a wheel on the configured Python package index."""

    project: str
    version: str
    member: str


class PinnedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The single file a pinned model consists of."""

    name: str
    size_bytes: int
    sha256: str


class CatalogModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model with a short name; sources are tried hub first, then package.

    `model_type` is that of config.json, `parameters` counts each weight once, lengths are in tokens.  `kv_heads`
    and `head_dim` are None for encoders, which keep no cache.  `quantization` is that of a GGUF file, and chooses
    it where none is pinned.  `stored_bytes` is what the weights take on disk, where that is not parameters times
    the width of `dtype`.  `released` is the year and month.
    """

    name: str
    hub: HubSource
    license: str
    kind: Kind
    model_type: str
    parameters: int
    layers: int
    context_length: int
    released: str
    good_for: str
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    num_experts: int | None = None
    quantization: str | None = None
    stored_bytes: int | None = None
    gated: bool = False
    other_names: tuple[str, ...] = ()
    package: PackageSource | None = None
    file: PinnedFile | None = None
    sampling_defaults: dict[str, float] = {}
    variant_of: str | None = None
    """The name of the model that this one is a quantisation of."""

    def __post_init__(self) -> None:
        if self.file is not None and self.hub.revision is None:
            raise ValueError(f"{self.name}: a pinned file needs a pinned revision")
        if self.package is not None and self.file is None:
            raise ValueError(f"{self.name}: a package source needs a pinned file")

    @property
    def all_names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)


@cache
def catalog_models() -> dict[str, CatalogModel]:
    """Every model of the catalogue by each of its names; the data is part of the package and never changes."""
    text = resources.files("store").joinpath("catalog.toml").read_text(encoding="utf-8")
    by_name: dict[str, CatalogModel] = {}
    for model in read_catalog(text):
        for name in model.all_names:
            if name in by_name:
                raise ValueError(f"the catalogue names {name} twice")
            by_name[name] = model
    return by_name


def read_catalog(text: str) -> Iterator[CatalogModel]:
    """The models of a catalogue in TOML, each followed by its quantised variant, if it has one.

    A line of `models` goes before what its family says.  Raises ValueError.
    """
    for family in tomllib.loads(text)["families"]:
        for line in family.pop("models"):
            yield from _read_line({**family, **line})


def _read_line(line: dict[str, Any]) -> Iterator[CatalogModel]:
    gguf, gguf_gb = line.pop("gguf", None), line.pop("gguf_gb", None)
    hub = {"repo": line.pop("repo"), "revision": line.pop("revision", None)}
    model = msgspec.convert({**line, "hub": hub}, CatalogModel)
    yield model
    if gguf is None:
        return
    repo, _, quantization = gguf.partition(":")
    suffix = "-" + quantization.lower()
    yield msgspec.structs.replace(
        model,
        name=model.name + suffix,
        other_names=tuple(name + suffix for name in model.other_names),
        hub=HubSource(repo),
        quantization=quantization,
        stored_bytes=round(gguf_gb * _BYTES_PER_GB),
        gated=False,
        variant_of=model.name,
    )


def distinct_models() -> tuple[CatalogModel, ...]:
    """Every model once, in the order of the catalogue."""
    return tuple(model for name, model in catalog_models().items() if name == model.name)


def canonical_alias(alias: str) -> str:
    """The display name of a lower-case alias; an alias nobody knows is its own."""
    model = catalog_models().get(alias)
    return model.name if model else alias


def similar_names(alias: str) -> list[str]:
    """Up to three catalogue names that look like `alias`, best first."""
    known = catalog_models()
    close = difflib.get_close_matches(alias, known, n=6, cutoff=0.5)
    return list(dict.fromkeys(known[name].name for name in close))[:3]


def search_catalog(words: str) -> list[CatalogModel]:
    """The models that have all `words` in their names, repository, kind or purpose, best first.

    Quantised variants come only when asked for by their type, or as "gguf".
    """
    wanted = words.casefold().split()
    found = [model for model in distinct_models() if _has_all(model, wanted)]
    return sorted(found, key=lambda model: not any(name.startswith(tuple(wanted)) for name in model.all_names))


def _has_all(model: CatalogModel, words: list[str]) -> bool:
    stored_as = f"{model.quantization} gguf".casefold() if model.quantization else ""
    if model.variant_of and not any(word in stored_as for word in words):
        return False
    described = (
        *model.all_names,
        model.hub.repo,
        model.kind,
        _KIND_WORDS.get(model.kind, ""),
        model.good_for,
        stored_as,
    )
    text = " ".join(described).casefold()
    return all(word in text for word in words)
