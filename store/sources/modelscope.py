"""The API of ModelScope (modelscope.cn): what does a repository hold, where are its bytes.

Its revisions are branches that move and it names no commits, so the commit here is a fingerprint of
the file list: it changes whenever a file does.  Called by `store.sources.lookup`.
"""

from __future__ import annotations

import hashlib
from urllib.parse import quote

import msgspec

from store.errors import AccessDenied, HubUnreachable, InvalidName, ModelNotFound
from store.names import CommitId, RepoFile, RepoId, Revision
from store.sources.json_api import ApiFailure, ApiRequest, get
from store.sources.listing import HubFile, RepoListing, listed_file

DEFAULT_REVISION = Revision("master")
_PAGE_SIZE = 500
_SMALLEST_PAGE = 50
"""A shorter page than any server would cut a list into is the last."""
_MAX_PAGES = 100
HOW_TO_CHANGE_ENDPOINT = "set MODELSCOPE_ENDPOINT to an address that this machine can reach"


class _File(msgspec.Struct, rename="pascal"):
    path: str
    type: str = "blob"
    size: int | None = None
    sha256: str | None = None


class _Files(msgspec.Struct, rename="pascal"):
    files: tuple[_File, ...] | None = None


class _Answer(msgspec.Struct, rename="pascal"):
    code: int = 200
    message: str = ""
    data: _Files | None = None


def list_repo(
    endpoint: str, repo: RepoId, revision: Revision | None, token: str | None, request: ApiRequest
) -> RepoListing:
    """List a branch's files with sizes and digests.  Raises ModelNotFound, AccessDenied or HubUnreachable."""
    branch = revision or DEFAULT_REVISION
    found: dict[RepoFile, HubFile] = {}
    try:
        for number in range(1, _MAX_PAGES + 1):
            page = _page(endpoint, repo, branch, number, token, request)
            listed = (listed_file(file.path, file.size, file.sha256) for file in page if file.type != "tree")
            new = {file.path: file for file in listed if file is not None and file.path not in found}
            found |= new
            # Where pages are unknown the second is the first again.
            if len(page) < _SMALLEST_PAGE or not new:
                break
    except (ApiFailure, msgspec.MsgspecError, RecursionError, InvalidName, ValueError) as error:
        reason = error if isinstance(error, ApiFailure) else f"gave no usable listing of {repo}"
        raise HubUnreachable(f"{endpoint} {reason}; try again or {HOW_TO_CHANGE_ENDPOINT}.") from error
    if not found:
        raise ModelNotFound(f"{endpoint} lists no files of {repo} at revision {branch}; check the name.")
    files = tuple(found.values())
    return RepoListing(
        repo=repo,
        endpoint=endpoint,
        commit=_fingerprint(files),
        resolve_base=f"{endpoint}/models/{repo.path}/resolve/{branch}",
        files=files,
    )


def _page(
    endpoint: str, repo: RepoId, branch: Revision, number: int, token: str | None, request: ApiRequest
) -> tuple[_File, ...]:
    query = f"Revision={quote(branch, safe='')}&Recursive=true&PageNumber={number}&PageSize={_PAGE_SIZE}"
    answer = get(f"{endpoint}/api/v1/models/{repo.path}/repo/files?{query}", token, request)
    if answer.status in (401, 403):
        raise AccessDenied(
            f"{endpoint} does not let this account read {repo}; set MODELSCOPE_API_TOKEN to a token that may."
        )
    if answer.status == 404:
        raise ModelNotFound(f"{endpoint} has no repository {repo} or no revision {branch} of it; check the name.")
    if answer.status != 200:
        raise ApiFailure(f"answered with HTTP status {answer.status}")
    data = msgspec.json.decode(answer.body, type=_Answer).data
    return data.files or () if data is not None else ()


def _fingerprint(files: tuple[HubFile, ...]) -> CommitId:
    lines = sorted(f"{file.path}\0{file.size_bytes}\0{file.digest}\n" for file in files)
    return CommitId(hashlib.sha1("".join(lines).encode(), usedforsecurity=False).hexdigest())
