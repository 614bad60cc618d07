"""The catalogue of short names that ships with the product (`catalog.toml` beside this file).

Says where a model comes from, in which order, and what its bytes must be.  Knows nothing of what
is installed and does no I/O beyond reading its own data file once.  Called by `names` (canonical
aliases), `pull` (sources) and `models` (finding an alias by its repository).
"""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from importlib import resources

import msgspec


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


class CatalogModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model with a short name; sources are tried hub first, then package."""

    name: str
    hub: HubSource
    license: str
    other_names: tuple[str, ...] = ()
    package: PackageSource | None = None
    file: PinnedFile | None = None
    sampling_defaults: dict[str, float] = {}

    def __post_init__(self) -> None:
        if self.file is not None and self.hub.revision is None:
            raise ValueError(f"{self.name}: a pinned file needs a pinned revision")
        if self.package is not None and self.file is None:
            raise ValueError(f"{self.name}: a package source needs a pinned file")


class _CatalogFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[CatalogModel, ...]


@cache
def catalog_models() -> dict[str, CatalogModel]:
    """Every model of the catalogue by each of its names; the data is part of the package and never changes."""
    text = resources.files("store").joinpath("catalog.toml").read_text(encoding="utf-8")
    parsed = msgspec.convert(tomllib.loads(text), _CatalogFile)
    by_name: dict[str, CatalogModel] = {}
    for model in parsed.models:
        for name in (model.name, *model.other_names):
            if name in by_name:
                raise ValueError(f"the catalogue names {name} twice")
            by_name[name] = model
    return by_name


def canonical_alias(alias: str) -> str:
    """The display name of a lower-case alias; an alias nobody knows is its own."""
    model = catalog_models().get(alias)
    return model.name if model else alias


def similar_names(alias: str) -> list[str]:
    """Up to three catalogue names that look like `alias`, best first."""
    known = catalog_models()
    close = difflib.get_close_matches(alias, known, n=6, cutoff=0.5)
    return list(dict.fromkeys(known[name].name for name in close))[:3]
