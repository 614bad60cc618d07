"""The API of the model hub and of mirrors that speak it: what does a repository hold, where are its bytes.

Knows the hub's addresses and answers, not the layout on disk; the bytes themselves travel through
`store.transfer`.  Called by `store.sources.lookup`.
"""

from __future__ import annotations

from urllib.parse import quote, urlsplit

import msgspec

from store.errors import AccessDenied, HubUnreachable, InvalidName, ModelNotFound, StoreError
from store.names import CommitId, RepoFile, RepoId, Revision
from store.sources.json_api import ApiAnswer, ApiFailure, ApiRequest, get
from store.sources.listing import HubFile, RepoListing, listed_file
from store.transfer.credentials import origin_of

HOW_TO_CHANGE_ENDPOINT = "set HF_ENDPOINT or hub_mirrors to a hub or mirror that this machine can reach"
_MAX_PAGES = 200


class _Lfs(msgspec.Struct):
    sha256: str | None = None
    oid: str | None = None
    size: int | None = None


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    blob_id: str | None = msgspec.field(default=None, name="blobId")
    lfs: _Lfs | None = None


class _Card(msgspec.Struct):
    license: object = None


class _ModelInfo(msgspec.Struct):
    sha: str
    siblings: tuple[_Sibling, ...] = ()
    card: _Card | None = msgspec.field(default=None, name="cardData")
    gated: bool | str | None = False


class _TreeEntry(msgspec.Struct):
    path: str
    type: str = "file"
    size: int | None = None
    oid: str | None = None
    lfs: _Lfs | None = None


def list_repo(
    endpoint: str, repo: RepoId, revision: Revision | None, token: str | None, request: ApiRequest
) -> RepoListing:
    """Resolve `revision` (default branch when None) to a commit and list its files with sizes and digests.

    Raises ModelNotFound, AccessDenied or HubUnreachable; each reason names the endpoint.
    """
    at_revision = f"/revision/{quote(revision, safe='')}" if revision else ""
    path = f"/api/models/{repo.path}{at_revision}?blobs=true"
    try:
        answer = _ask(endpoint, path, token, request)
        if error := _refusal(answer, endpoint, repo, revision, has_token=token is not None):
            raise error
        info = msgspec.json.decode(answer.body, type=_ModelInfo)
        commit = CommitId(info.sha)
        # A mirror that sends its visitors elsewhere has the bytes there too, and its token is not for there.
        base = answer.origin if answer.origin != origin_of(endpoint) else endpoint
        files = [listed_file(item.rfilename, *_identity(item.size, item.blob_id, item.lfs)) for item in info.siblings]
        if any(file is not None and file.size_bytes is None for file in files):
            # Some mirrors leave the details out of this answer and give them in the tree.
            details = _tree(base, repo, commit, token if base == endpoint else None, request)
            files = [file and details.get(file.path, file) for file in files]
    except (ApiFailure, msgspec.MsgspecError, RecursionError, InvalidName, ValueError) as error:
        raise HubUnreachable(f"{endpoint} {_phrase(error, repo)}; try again or {HOW_TO_CHANGE_ENDPOINT}.") from error
    license_name = info.card.license if info.card else None
    return RepoListing(
        repo=repo,
        endpoint=base,
        commit=commit,
        resolve_base=f"{base}/{repo.path}/resolve/{commit}",
        files=tuple(file for file in files if file is not None),
        license=license_name if isinstance(license_name, str) else None,
        is_gated=bool(info.gated),
    )


def _ask(endpoint: str, path: str, token: str | None, request: ApiRequest) -> ApiAnswer:
    answer = get(endpoint + path, token, request)
    if token is not None and answer.status == 401:
        # An expired token turns even public repositories away.
        anonymous = get(endpoint + path, None, request)
        return anonymous if anonymous.status == 200 else answer
    return answer


def _refusal(
    answer: ApiAnswer, endpoint: str, repo: RepoId, revision: Revision | None, *, has_token: bool
) -> StoreError | None:
    """The error that a status stands for; None when the answer is a listing.  Raises ApiFailure for strange ones."""
    if answer.status == 200:
        return None
    if answer.error_code == "GatedRepo":
        return gated(endpoint, repo)
    if answer.status == 403:
        return AccessDenied(
            f"{endpoint} refuses {repo} (HTTP status 403); run `quire login` with a token that may read it, or "
            f"{HOW_TO_CHANGE_ENDPOINT}."
        )
    if answer.error_code == "RevisionNotFound":
        return ModelNotFound(f"{endpoint} has no revision {revision} of {repo}; check the name after the @.")
    if answer.status in (401, 404):
        login = "" if has_token else ", or run `quire login` if it is private"
        return ModelNotFound(f"{endpoint} has no repository {repo} that this account may read; check the name{login}.")
    raise ApiFailure(f"answered with HTTP status {answer.status}")


def gated(endpoint: str, repo: RepoId) -> AccessDenied:
    """The sentence for a repository whose terms must be accepted first."""
    return AccessDenied(
        f"{repo} is gated: accept its terms at {endpoint}/{repo.path}, run `quire login` with a token of that account "
        "(or set HF_TOKEN), and pull again."
    )


def _tree(
    endpoint: str, repo: RepoId, commit: CommitId, token: str | None, request: ApiRequest
) -> dict[RepoFile, HubFile]:
    """Files by way of the paginated tree, as far as the endpoint tells them."""
    path = f"/api/models/{repo.path}/tree/{commit}?recursive=true"
    found: dict[RepoFile, HubFile] = {}
    for _ in range(_MAX_PAGES):
        answer = _ask(endpoint, path, token, request)
        if answer.status != 200:
            break
        entries = msgspec.json.decode(answer.body, type=list[_TreeEntry])
        files = [listed_file(entry.path, *_identity(entry.size, entry.oid, entry.lfs)) for entry in entries
                 if entry.type == "file"]  # fmt: skip
        new = {file.path: file for file in files if file is not None and file.path not in found}
        found |= new
        # A mirror that ignores the cursor gives its first page for ever.
        if not answer.next_link or (entries and not new and any(file is not None for file in files)):
            break
        # The link names the original hub, whatever the mirror.
        link = urlsplit(answer.next_link)
        path = f"{link.path}?{link.query}"
    return found


def _identity(size: int | None, blob_id: str | None, lfs: _Lfs | None) -> tuple[int | None, str | None]:
    """Size and digest: of a large file its sha256, of a small one its git blob id."""
    if lfs is None:
        return size, blob_id
    return lfs.size if lfs.size is not None else size, lfs.sha256 or lfs.oid


def _phrase(error: Exception, repo: RepoId) -> str:
    if isinstance(error, ApiFailure):
        return str(error)
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return f"gave no usable listing of {repo} ({reason.rstrip('.')})"
