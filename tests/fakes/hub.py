"""A small model hub over a loopback socket that can misbehave: a stand-in for huggingface.co and modelscope.cn.

Repositories and faults are plain attributes that a test sets before or between requests; the HTTP
is in `tests.fakes.hub_handler`.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import ThreadingHTTPServer
from typing import Any, Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "fedcba9876543210fedcba9876543210fedcba98"


@dataclass
class FakeRepo:
    """`files` is what `commit` and the branch main hold; `gated` keeps the bytes from whoever has no right token."""

    files: dict[str, bytes]
    commit: str = COMMIT
    license: str | None = "apache-2.0"
    gated: bool = False
    lfs_suffixes: tuple[str, ...] = (".safetensors", ".gguf")
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def push(self, files: dict[str, bytes], commit: str = OTHER_COMMIT) -> None:
        """Make `files` the newest commit; the older one can still be asked for by its id."""
        self.history[self.commit] = self.files
        self.files, self.commit = files, commit

    def at(self, revision: str | None) -> tuple[str, dict[str, bytes]] | None:
        """The commit that a revision stands for and its files."""
        if revision in (None, "main", "master", self.commit):
            return self.commit, self.files
        return (revision, self.history[revision]) if revision in self.history else None


@dataclass
class Faults:
    """What goes wrong.  Lists are used up, one entry per request for a file's bytes; None in them means no fault.

    Bytes to drop or stall after wait for an answer that has more: files are fetched several at once, in any order.
    `drop_every_bytes` cuts each answer with bytes short; `contents_after_cut` then replaces files, once.
    `drip_bytes_per_s` is the rate of each answer with bytes.  `api_body` is sent in place of every
    listing, `api_padding_bytes` of white space before it.  `link_base` is the address that links to
    further pages name, by default the hub's own.  `max_at_once` answers with bytes are given at one time, further
    requests get a 503.
    """

    drop_after_bytes: list[int | None] = field(default_factory=list)
    stall_after_bytes: list[int | None] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    drop_every_bytes: int | None = None
    contents_after_cut: dict[str, bytes] = field(default_factory=dict)
    drip_bytes_per_s: int | None = None
    retry_after: str | None = None
    max_at_once: int | None = None
    ignore_range: bool = False
    wrong_bytes: bool = False
    hide_digests: bool = False
    stall_everything: bool = False
    required_token: str | None = None
    redirect_files_to: str | None = None
    redirect_api_to: str | None = None
    redirect_status: int = 302
    api_statuses: list[int | None] = field(default_factory=list)
    api_body: bytes | None = None
    api_padding_bytes: int = 0
    page_size: int = 1000
    link_base: str | None = None


@dataclass(frozen=True)
class SeenRequest:
    method: str
    path: str
    authorization: str | None
    range: str | None


class FakeHub:
    """`with FakeHub() as hub:` listens on `hub.endpoint` until the block ends."""

    def __init__(self) -> None:
        from tests.fakes.hub_handler import HubHandler

        self.repos: dict[str, FakeRepo] = {}
        self.search_results: list[dict[str, Any]] = []
        """What a search looks through, as the hub's API tells it."""
        self.searches: list[dict[str, list[str]]] = []
        """The parameters of each search."""
        self.faults = Faults()
        self.requests: list[SeenRequest] = []
        self.sent_bytes = 0
        """Bytes of files that were sent, over all requests."""
        self.num_answering = 0
        """Answers with bytes that are being sent."""
        self.lock = threading.Lock()
        """Held to change what requests share."""
        self.released = threading.Event()
        """Ends every stall."""
        self.stalled = threading.Event()
        """Set once a request stalls."""
        self._server = HubServer(("127.0.0.1", 0), HubHandler)
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
        return [
            seen
            for seen in list(self.requests)
            if seen.method == "GET" and "/resolve/" in seen.path and seen.path.endswith(file)
        ]

    def api_requests(self) -> list[SeenRequest]:
        """Requests that were not for a file."""
        return [seen for seen in list(self.requests) if "/resolve/" not in seen.path]


class HubServer(ThreadingHTTPServer):
    """The socket of one hub; its threads are joined when it closes."""

    daemon_threads = False
    request_queue_size = 64
    hub: FakeHub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the tests."""


def unused_endpoint() -> str:
    """An address where nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@lru_cache(maxsize=64)
def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@lru_cache(maxsize=64)
def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
