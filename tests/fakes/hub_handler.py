"""The HTTP of the stand-in hub: listings, files with ranges and entity tags, and every fault of `Faults`."""

from __future__ import annotations

import json
import re
import socket
import time
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.fakes.hub import FakeRepo, HubServer, SeenRequest, git_blob_id, sha256

CHUNK_BYTES = 64 * 1024
_FLIPPED = bytes(byte ^ 0xFF for byte in range(256))

_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?")
_PATHS_INFO = re.compile(r"/api/models/([^/]+/[^/]+)/paths-info/([^/]+)")
_RESOLVE = re.compile(r"(?:/models)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_MODELSCOPE_FILES = re.compile(r"/api/v1/models/([^/]+/[^/]+)/repo/files")


class HubHandler(BaseHTTPRequestHandler):
    """One connection, one request."""

    protocol_version = "HTTP/1.1"
    timeout = 10
    server: HubServer

    def setup(self) -> None:
        # What waits in a large buffer would be counted as sent to a client that was killed before.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)
        super().setup()

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server.hub
        target = urlsplit(self.path)
        path, self._query = unquote(target.path), parse_qs(target.query)
        headers = self.headers
        hub.requests.append(SeenRequest(self.command, target.path, headers.get("Authorization"), headers.get("Range")))
        self.close_connection = True
        if hub.faults.stall_everything:
            self._stall()
        elif match := _RESOLVE.fullmatch(path):
            self._file(match[1], match[2], match[3])
        elif match := _TREE.fullmatch(path):
            self._tree(match[1], match[2])
        elif match := _PATHS_INFO.fullmatch(path):
            self._paths_info(match[1], match[2])
        elif match := _INFO.fullmatch(path):
            self._model_info(match[1], match[2])
        elif match := _MODELSCOPE_FILES.fullmatch(path):
            self._modelscope_files(match[1])
        elif path == "/api/models":
            self._search()
        elif path == "/api/whoami-v2":
            self._whoami()
        else:
            self._send(404, b"")

    def _search(self) -> None:
        hub = self.server.hub
        hub.searches.append(self._query)
        if status := self._next(hub.faults.api_statuses):
            self._send(status, b"", self._retry_after())
            return
        words = self._query.get("search", [""])[0].lower().split()
        found = [item for item in hub.search_results if all(word in str(item.get("id")).lower() for word in words)]
        body = json.dumps(found[: int(self._query.get("limit", ["1000"])[0])]).encode()
        self._send(200, hub.faults.api_body or body)

    def _stall(self) -> None:
        self.server.hub.stalled.set()
        self.server.hub.released.wait(30)

    def _next(self, entries: list[Any]) -> Any:
        with self.server.hub.lock:
            return entries.pop(0) if entries else None

    def _next_cut(self, entries: list[int | None], length: int) -> int | None:
        """The next entry, unless it waits for an answer of more bytes than `length`."""
        with self.server.hub.lock:
            return entries.pop(0) if entries and (entries[0] is None or entries[0] < length) else None

    def _retry_after(self) -> dict[str, str]:
        retry_after = self.server.hub.faults.retry_after
        return {"Retry-After": retry_after} if retry_after is not None else {}

    def _has_token(self) -> bool:
        token = self.server.hub.faults.required_token
        return token is None or self.headers.get("Authorization") == f"Bearer {token}"

    # Listings

    def _repo_for_api(self, repo_id: str) -> FakeRepo | None:
        """The repository, or None after a refusal was sent."""
        faults = self.server.hub.faults
        if faults.redirect_api_to is not None:
            self._send(faults.redirect_status, b"", {"Location": f"{faults.redirect_api_to}{self.path}"})
            return None
        if status := self._next(faults.api_statuses):
            self._send(status, b"", self._retry_after())
            return None
        repo = self.server.hub.repos.get(repo_id)
        if repo is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        if not repo.gated and not self._has_token():
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        return repo

    def _model_info(self, repo_id: str, revision: str | None) -> None:
        repo = self._repo_for_api(repo_id)
        if repo is None:
            return
        found = repo.at(revision)
        if found is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        commit, files = found
        with_sizes = "blobs" in self._query and not self.server.hub.faults.hide_digests
        siblings = [_sibling(repo, name, content, with_sizes=with_sizes) for name, content in files.items()]
        info = {
            "id": repo_id,
            "sha": commit,
            "gated": "manual" if repo.gated else False,
            "siblings": siblings,
            "cardData": {"license": repo.license} if repo.license else None,
        }
        self._send_json(info)

    def _tree(self, repo_id: str, revision: str) -> None:
        """One page of the files; the link to the next one is absolute, as the real hub's is."""
        hub = self.server.hub
        repo = self._repo_for_api(repo_id)
        found = repo.at(revision) if repo is not None else None
        if repo is None:
            return
        if found is None or hub.faults.hide_digests:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        start = int(self._query.get("cursor", ["0"])[0])
        end = start + hub.faults.page_size
        entries = [_tree_entry(repo, name, content) for name, content in list(found[1].items())[start:end]]
        headers = {}
        if end < len(found[1]):
            base = hub.faults.link_base or hub.endpoint
            path = urlsplit(self.path).path
            headers["Link"] = f'<{base}{path}?recursive=true&cursor={end}>; rel="next"'
        self._send_json(entries, headers)

    def _paths_info(self, repo_id: str, revision: str) -> None:
        """The tree's entries of the paths that a form names; mirrors ask for them."""
        form = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode())
        repo = self._repo_for_api(repo_id)
        found = repo.at(revision) if repo is not None else None
        if repo is not None and found is not None:
            files = {name: found[1][name] for name in form.get("paths", []) if name in found[1]}
            self._send_json([_tree_entry(repo, name, content) for name, content in files.items()])

    def _modelscope_files(self, repo_id: str) -> None:
        repo = self._repo_for_api(repo_id)
        if repo is None:
            return
        found = repo.at(self._query.get("Revision", ["master"])[0])
        if found is None:
            self._send_json({"Code": 10010205001, "Message": "revision not found", "Success": False, "Data": None})
            return
        files = [
            {"Path": name, "Name": name, "Type": "blob", "Size": len(content), "Sha256": sha256(content)}
            for name, content in found[1].items()
        ]
        folder = {"Path": "folder", "Name": "folder", "Type": "tree", "Size": 0, "Sha256": ""}
        size = self.server.hub.faults.page_size
        start = (int(self._query.get("PageNumber", ["1"])[0]) - 1) * size
        page = [folder, *files][start : start + size]
        self._send_json({"Code": 200, "Message": "success", "Success": True, "Data": {"Files": page}})

    def _whoami(self) -> None:
        if self.server.hub.faults.required_token is not None and self._has_token():
            self._send_json({"name": "somebody", "type": "user"})
        else:
            self._send(401, b"")

    def _send_json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        faults = self.server.hub.faults
        body = json.dumps(value).encode() if faults.api_body is None else faults.api_body
        self._send(200, b" " * faults.api_padding_bytes + body, {"Content-Type": "application/json"} | (headers or {}))

    # Files

    def _file(self, repo_id: str, revision: str, name: str) -> None:
        hub = self.server.hub
        repo = hub.repos.get(repo_id)
        if repo is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        if not self._has_token() or (repo.gated and hub.faults.required_token is None):
            code = "GatedRepo" if repo.gated else "RepoNotFound"
            self._send(403 if repo.gated else 401, b"", {"X-Error-Code": code})
            return
        found = repo.at(revision)
        if found is None or name not in found[1]:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET" and (status := self._next(hub.faults.statuses)):
            self._send(status, b"", self._retry_after())
            return
        content = found[1][name]
        if hub.faults.redirect_files_to is not None:
            location = f"{hub.faults.redirect_files_to}{self.path}"
            headers = {"Location": location, "X-Linked-ETag": f'"{sha256(content)}"'}
            self._send(hub.faults.redirect_status, b"", headers)
            return
        with hub.lock:
            hub.num_answering += 1
            is_busy = hub.faults.max_at_once is not None and hub.num_answering > hub.faults.max_at_once
        try:
            if is_busy:
                self._send(503, b"")
            else:
                self._send_content(content, repo, found[0])
        finally:
            with hub.lock:
                hub.num_answering -= 1

    def _send_content(self, content: bytes, repo: FakeRepo, commit: str) -> None:
        faults = self.server.hub.faults
        headers = {"ETag": f'"{git_blob_id(content)}"', "Accept-Ranges": "bytes", "X-Repo-Commit": commit}
        body = content.translate(_FLIPPED) if faults.wrong_bytes else content
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None or faults.ignore_range:
            self._send(200, body, headers, repo=repo)
            return
        start = int(match[1])
        end = min(int(match[2]) + 1 if match[2] else len(body), len(body))
        if start >= len(body):
            self._send(416, b"", {"Content-Range": f"bytes */{len(body)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(body)}"
        self._send(206, body[start:end], headers, repo=repo)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, repo: FakeRepo | None = None
    ) -> None:
        """Send an answer; one with a file's bytes, which names its `repo`, may break."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        if repo is None:
            self.wfile.write(body)
        else:
            self._send_bytes(body, repo)

    def _send_bytes(self, body: bytes, repo: FakeRepo) -> None:
        hub = self.server.hub
        faults = hub.faults
        stall = self._next_cut(faults.stall_after_bytes, len(body))
        drops = (self._next_cut(faults.drop_after_bytes, len(body)), faults.drop_every_bytes)
        stop = min(count for count in (*drops, stall, len(body)) if count is not None)
        self._write(body, 0, stop)
        if stall is not None:
            self._stall()
            self._write(body, stop, len(body))
        elif stop < len(body):
            with hub.lock:
                repo.files.update(faults.contents_after_cut)
                faults.contents_after_cut = {}

    def _write(self, body: bytes, start: int, end: int) -> None:
        hub = self.server.hub
        rate = hub.faults.drip_bytes_per_s
        size = CHUNK_BYTES if rate is None else max(1, rate // 20)
        view = memoryview(body)
        for offset in range(start, end, size):
            piece = view[offset : min(offset + size, end)]
            self.wfile.write(piece)
            with hub.lock:
                hub.sent_bytes += len(piece)
            if rate is not None:
                self.wfile.flush()
                time.sleep(len(piece) / rate)
        self.wfile.flush()


def _sibling(repo: FakeRepo, name: str, content: bytes, *, with_sizes: bool) -> dict[str, Any]:
    if not with_sizes:
        return {"rfilename": name}
    sibling: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_blob_id(content)}
    if name.endswith(repo.lfs_suffixes):
        sibling["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 130}
    return sibling


def _tree_entry(repo: FakeRepo, name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": git_blob_id(content)}
    if name.endswith(repo.lfs_suffixes):
        entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
    return entry
