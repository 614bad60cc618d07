"""A small model hub over a loopback socket that can misbehave: a stand-in for huggingface.co.

Serves model info (with sizes and digests) and files by `resolve`, with ranges and entity tags.
Faults are plain attributes that a test sets before or between requests.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHUNK_BYTES = 16 * 1024


@dataclass
class FakeRepo:
    files: dict[str, bytes]
    commit: str = COMMIT
    license: str | None = "apache-2.0"
    gated: bool = False
    lfs_suffixes: tuple[str, ...] = (".safetensors", ".gguf")


@dataclass
class Faults:
    """What goes wrong.  Lists are used up, one entry per file request; None in them means no fault."""

    drop_after_bytes: list[int | None] = field(default_factory=list)
    stall_after_bytes: list[int | None] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    ignore_range: bool = False
    wrong_bytes: bool = False
    hide_digests: bool = False
    stall_everything: bool = False
    required_token: str | None = None
    redirect_files_to: str | None = None


@dataclass(frozen=True)
class SeenRequest:
    method: str
    path: str
    authorization: str | None
    range: str | None


class FakeHub:
    """`with FakeHub() as hub:` listens on `hub.endpoint` until the block ends."""

    def __init__(self) -> None:
        self.repos: dict[str, FakeRepo] = {}
        self.faults = Faults()
        self.requests: list[SeenRequest] = []
        self.released = threading.Event()
        """Ends every stall."""
        self.stalled = threading.Event()
        """Set once a request stalls."""
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(self, repo: str, files: dict[str, bytes], **facts: Any) -> FakeRepo:
        self.repos[repo] = FakeRepo(files, **facts)
        return self.repos[repo]

    def file_requests(self, file: str = "") -> list[SeenRequest]:
        """GET requests for the bytes of files whose path ends in `file`."""
        return [seen for seen in self.requests if seen.method == "GET" and _RESOLVE.match(seen.path + "?")
                and seen.path.endswith(file)]  # fmt: skip


def unused_endpoint() -> str:
    """An address where nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^?]+))?\?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)\?")


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    hub: FakeHub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        hub = self.server.hub
        headers = self.headers
        hub.requests.append(
            SeenRequest(self.command, urlsplit(self.path).path, headers.get("Authorization"), headers.get("Range"))
        )
        self.close_connection = True
        if hub.faults.stall_everything:
            self._stall()
            return
        target = unquote(self.path) + ("" if "?" in self.path else "?")
        if match := _INFO.match(target):
            self._model_info(match[1], match[2])
        elif match := _RESOLVE.match(target):
            self._file(match[1], match[2], match[3], with_body=with_body)
        else:
            self._send(404, b"")

    def _stall(self) -> None:
        self.server.hub.stalled.set()
        self.server.hub.released.wait(30)

    def _denied(self, repo: FakeRepo | None) -> bool:
        if repo is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return True
        token = self.server.hub.faults.required_token
        if repo.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return True
        if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            return True
        return False

    def _model_info(self, repo_id: str, revision: str | None) -> None:
        repo = self.server.hub.repos.get(repo_id)
        if self._denied(repo):
            return
        assert repo is not None
        if revision not in (None, "main", repo.commit):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [self._sibling(repo, name, content) for name, content in repo.files.items()]
        card = {"license": repo.license} if repo.license else None
        info = {"id": repo_id, "sha": repo.commit, "siblings": siblings, "cardData": card}
        self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _sibling(self, repo: FakeRepo, name: str, content: bytes) -> dict[str, Any]:
        if self.server.hub.faults.hide_digests:
            return {"rfilename": name}
        sibling: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_blob_id(content)}
        if name.endswith(repo.lfs_suffixes):
            sibling["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 130}
        return sibling

    def _file(self, repo_id: str, commit: str, name: str, *, with_body: bool) -> None:
        hub = self.server.hub
        repo = hub.repos.get(repo_id)
        if self._denied(repo):
            return
        assert repo is not None
        if commit != repo.commit or name not in repo.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        if with_body and hub.faults.statuses and (status := hub.faults.statuses.pop(0)):
            self._send(status, b"")
            return
        content = repo.files[name]
        if hub.faults.redirect_files_to is not None:
            location = f"{hub.faults.redirect_files_to}{self.path}"
            self._send(302, b"", {"Location": location, "X-Linked-ETag": f'"{sha256(content)}"'})
            return
        self._send_file(content, with_body=with_body)

    def _send_file(self, content: bytes, *, with_body: bool) -> None:
        faults = self.server.hub.faults
        etag = {"ETag": f'"{git_blob_id(content)}"', "Accept-Ranges": "bytes"}
        body = bytes(byte ^ 0xFF for byte in content) if faults.wrong_bytes else content
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if match is None or faults.ignore_range:
            self._send(200, body, etag, with_body=with_body, may_break=True)
            return
        start = int(match[1])
        if start >= len(body):
            self._send(416, b"", {"Content-Range": f"bytes */{len(body)}"})
            return
        content_range = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self._send(206, body[start:], etag | {"Content-Range": content_range}, with_body=with_body, may_break=True)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        with_body: bool = True,
        may_break: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD" or not with_body:
            return
        faults = self.server.hub.faults
        drop = faults.drop_after_bytes.pop(0) if may_break and faults.drop_after_bytes else None
        stall = faults.stall_after_bytes.pop(0) if may_break and faults.stall_after_bytes else None
        stop = min(count for count in (drop, stall, len(body)) if count is not None)
        for offset in range(0, stop, CHUNK_BYTES):
            self.wfile.write(body[offset : min(offset + CHUNK_BYTES, stop)])
        self.wfile.flush()
        if stall is not None:
            self._stall()
            self.wfile.write(body[stop:])
