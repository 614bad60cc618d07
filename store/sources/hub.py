"""The model hub (or a mirror with the same API): is it there, what does a repository hold, where are the bytes.

Knows the hub's addresses and answers, not the layout on disk; the bytes themselves travel through
`store.transfer`.  Called by `pull`.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import httpx

from store.errors import AccessDenied, HubUnreachable, InvalidName, ModelNotFound, StoreError
from store.names import CommitId, Digest, RepoFile, RepoId, Revision

PROBE_TIMEOUT_S = 3.0
LISTING_TIMEOUT_S = 20.0
HOW_TO_CHANGE_ENDPOINT = "set HF_ENDPOINT to a hub or mirror that this machine can reach"


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a listing; a hub that reports neither size nor digest leaves None."""

    path: RepoFile
    size_bytes: int | None
    digest: Digest | None


@dataclass(frozen=True, slots=True)
class RepoListing:
    """A repository at one commit."""

    repo: RepoId
    commit: CommitId
    files: tuple[HubFile, ...]
    license: str | None


def reachable_endpoint(endpoints: tuple[str, ...], repo: RepoId, timeout_s: float = PROBE_TIMEOUT_S) -> str:
    """The first endpoint that answers anything about `repo` within `timeout_s`; "not found" is an answer too.

    Raises HubUnreachable naming every endpoint that did not.
    """
    failures: list[str] = []
    for endpoint in endpoints:
        failure = _probe(f"{endpoint}/api/models/{repo}", timeout_s)
        if failure is None:
            return endpoint
        failures.append(f"{endpoint} {failure}")
    tried = " and ".join(failures) or "no endpoint is configured"
    raise HubUnreachable(f"The model hub cannot be reached: {tried}; {HOW_TO_CHANGE_ENDPOINT}.")


def _probe(url: str, timeout_s: float) -> str | None:
    """Why nobody answers at `url`, or None.

    A thread of its own keeps the deadline: timeouts of an HTTP client count per address and per
    read, and cover no name resolution at all, which alone may take 20 s where DNS is filtered.
    """
    answer: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(_ask(url, timeout_s)), name="hub-probe", daemon=True).start()
    try:
        return answer.get(timeout=timeout_s)
    except queue.Empty:
        return f"did not answer within {timeout_s:g} s"


def _ask(url: str, timeout_s: float) -> str | None:
    try:
        with httpx.Client(timeout=timeout_s, follow_redirects=False) as client:
            status = client.head(url).status_code
    except httpx.TimeoutException:
        return f"did not answer within {timeout_s:g} s"
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        return f"failed ({error or type(error).__name__})"
    return f"answered with HTTP status {status}" if status >= 500 else None


def file_url(endpoint: str, repo: RepoId, commit: CommitId, file: RepoFile) -> str:
    """The address of a file's bytes at a commit."""
    return f"{endpoint}/{repo}/resolve/{commit}/{quote(file)}"


def list_repo(endpoint: str, repo: RepoId, revision: Revision | None, token: str | None) -> RepoListing:
    """Resolve `revision` (default branch when None) to a commit and list its files with sizes and digests.

    Raises ModelNotFound, AccessDenied or HubUnreachable.
    """
    from huggingface_hub.utils import httpx as hub_httpx  # type: ignore[attr-defined]  # httpx or httpx2, by version

    try:
        return _listing(repo, _model_info(endpoint, repo, revision, token))
    except (OSError, hub_httpx.HTTPError, AttributeError, KeyError, TypeError, ValueError, InvalidName) as error:
        raise _store_error(error, endpoint, repo, revision) from error


def _model_info(endpoint: str, repo: RepoId, revision: Revision | None, token: str | None) -> Any:
    from huggingface_hub import HfApi  # 0.2 s to import, and only a pull needs it
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    def ask(credential: str | Literal[False]) -> Any:
        # `model_info` takes a timeout and gives sizes and digests in one answer; the tree call takes
        # none and pages through links that name the original hub, whatever the mirror.
        return HfApi(endpoint=endpoint).model_info(
            repo, revision=revision, timeout=LISTING_TIMEOUT_S, files_metadata=True, token=credential
        )

    if token is None:
        return ask(False)
    try:
        return ask(token)
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        # An expired token turns even public repositories away.
        return ask(False)


def _store_error(error: Exception, endpoint: str, repo: RepoId, revision: Revision | None) -> StoreError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return AccessDenied(
            f"{repo} is gated: accept its terms at {endpoint}/{repo}, set HF_TOKEN to a token of that account, "
            "and pull again."
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFound(
            f"{endpoint} has no repository {repo} that this account may read; check the name, or set HF_TOKEN if it "
            "is private."
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFound(f"{repo} has no revision {revision}; check the name after the @.")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return HubUnreachable(f"{endpoint} did not list {repo} ({reason}); try again or {HOW_TO_CHANGE_ENDPOINT}.")


def _listing(repo: RepoId, info: Any) -> RepoListing:
    files = [file for sibling in info.siblings or [] if (file := _hub_file(sibling))]
    card = info.card_data
    license_name = card.get("license") if card is not None else None
    return RepoListing(
        repo=repo,
        commit=CommitId(str(info.sha)),
        files=tuple(files),
        license=license_name if isinstance(license_name, str) else None,
    )


def _hub_file(sibling: Any) -> HubFile | None:
    """A sibling as a validated value; None for a name that must not touch a disk, which no model needs."""
    try:
        path = RepoFile(sibling.rfilename)
    except InvalidName:
        return None
    digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
    size = sibling.size
    return HubFile(
        path=path,
        size_bytes=size if isinstance(size, int) and size >= 0 else None,
        digest=Digest(digest) if digest else None,
    )
