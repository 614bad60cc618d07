"""`WantedModel`: a name together with everything the catalogue or the person says about it.

Pure: knows the catalogue, nothing of disks or networks.  Called by `plan` and `pull`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from store import catalog
from store.catalog import CatalogModel, PackageSource, PinnedFile
from store.errors import ModelNotFound
from store.models import hub_reference, unknown_alias
from store.names import CommitId, ModelName, RepoFile, RepoId, Revision


@dataclass(frozen=True, slots=True)
class WantedModel:
    """`pinned` is the one file that the catalogue promises, `package` a second source of it."""

    name: str
    reference: str
    repo: RepoId
    revision: Revision | None = None
    file: RepoFile | None = None
    quantization: str | None = None
    pinned: PinnedFile | None = None
    package: PackageSource | None = None
    license: str | None = None
    sampling_defaults: dict[str, float] = field(default_factory=dict)

    @property
    def pinned_commit(self) -> CommitId:
        """The commit of the pinned file."""
        assert self.pinned is not None and self.revision is not None, "the catalogue pins a revision with every file"
        return CommitId(self.revision)


def resolve(name: ModelName) -> WantedModel:
    """What a name that is no path asks for.  Raises ModelNotFound for an alias that the catalogue does not have."""
    if name.kind == "alias":
        model = catalog.catalog_models().get(name.text)
        if model is None:
            raise ModelNotFound(unknown_alias(name))
        return _from_catalog(name, model)
    assert name.repo is not None
    return WantedModel(
        name=name.text,
        reference=name.text,
        repo=name.repo,
        revision=name.revision,
        file=name.file,
        quantization=name.quantization,
    )


def _from_catalog(name: ModelName, model: CatalogModel) -> WantedModel:
    return WantedModel(
        name=model.name,
        reference=hub_reference(name),
        repo=RepoId(model.hub.repo),
        revision=Revision(model.hub.revision) if model.hub.revision else None,
        file=RepoFile(model.file.name) if model.file else None,
        quantization=None if model.file else model.quantization,
        pinned=model.file,
        package=model.package,
        license=model.license,
        sampling_defaults=model.sampling_defaults,
    )
