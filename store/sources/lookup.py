"""Find a repository, or search for one: ask the hub and all its mirrors at once, and take the preferred answer.

Preferred is who stands first in the settings, not who is fastest: once one endpoint has the
repository, the others get a short grace.  Those that have it too serve when the chosen one breaks
off.  Knows nothing of the bytes; called by `plan` and by `quire search`.
"""

from __future__ import annotations

import queue
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, TypeVar

import httpx

from store.errors import AccessDenied, HubUnreachable, ModelNotFound, StoreError
from store.hub_settings import HubSettings
from store.names import RepoId, Revision
from store.progress import Reporter
from store.sources import hub as hub_api
from store.sources import hub_search
from store.sources import modelscope as modelscope_api
from store.sources.hub_search import SearchAnswer
from store.sources.json_api import ApiRequest
from store.sources.listing import RepoListing
from store.sources.network_memory import NetworkMemory
from store.transfer.failures import reason_of

_POLL_INTERVAL_S = 0.1

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class LookupPatience:
    """How long an endpoint may take, in seconds: to be connected, to begin its answer, to end it.

    Once one endpoint has the repository the others have `grace_s`, and `connected_grace_s` if a connection stands.
    """

    connect_s: float = 3.0
    begin_s: float = 8.0
    answer_s: float = 20.0
    grace_s: float = 0.5
    connected_grace_s: float = 2.0


class _Stage(IntEnum):
    """How far an endpoint has come with its answer."""

    ASKED = 0
    CONNECTED = 1
    ANSWERING = 2


def find_repo(
    hub: HubSettings,
    repo: RepoId,
    revision: Revision | None,
    reporter: Reporter,
    patience: LookupPatience = LookupPatience(),
) -> tuple[RepoListing, ...]:
    """Listings of all endpoints that have the repository, the preferred first; at least one.

    Raises ModelNotFound, AccessDenied, HubUnreachable, each naming every endpoint that was asked, or Cancelled.
    """
    is_modelscope = repo.registry == "modelscope"
    list_repo = modelscope_api.list_repo if is_modelscope else hub_api.list_repo
    endpoints = hub.endpoints_of(repo)

    def ask(endpoint: str, request: ApiRequest) -> RepoListing:
        return list_repo(endpoint, repo, revision, hub.token_for(endpoint), request)

    how_to = modelscope_api.HOW_TO_CHANGE_ENDPOINT if is_modelscope else hub_api.HOW_TO_CHANGE_ENDPOINT
    return _ask_all(hub, endpoints, ask, how_to, reporter, patience)


def search_hub(
    hub: HubSettings, words: str, limit: int, reporter: Reporter, patience: LookupPatience = LookupPatience()
) -> SearchAnswer:
    """Up to `limit` repositories that the preferred endpoint finds for `words`, the most fetched first.

    Raises HubUnreachable, which names every endpoint that was asked, or Cancelled.
    """

    def ask(endpoint: str, request: ApiRequest) -> SearchAnswer:
        return hub_search.search_models(endpoint, words, limit, hub.token_for(endpoint), request)

    return _ask_all(hub, hub.endpoints, ask, hub_api.HOW_TO_CHANGE_ENDPOINT, reporter, patience)[0]


def _ask_all(
    hub: HubSettings,
    endpoints: Sequence[str],
    ask: Callable[[str, ApiRequest], _Answer],
    how_to_change_endpoint: str,
    reporter: Reporter,
    patience: LookupPatience,
) -> tuple[_Answer, ...]:
    """What the endpoints answer, the preferred first; at least one answer.  Raises as `ask` does."""
    memory = NetworkMemory(hub.network_memory, endpoints)
    lookup = _Lookup(endpoints, memory.unreached(), ask, patience, _trust())
    lookup.run(reporter)
    if not lookup.answers:
        memory.remember(())
        raise _nobody_has_it(lookup, how_to_change_endpoint)
    memory.remember([endpoint for endpoint in endpoints if lookup.is_unreached(endpoint)])
    return tuple(lookup.answers[endpoint] for endpoint in endpoints if endpoint in lookup.answers)


def _trust() -> ssl.SSLContext:
    """The certificates that count, read once for all endpoints and before any deadline runs.  Raises HubUnreachable."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise HubUnreachable(
            f"The certificates of this machine cannot be read ({reason_of(error)}); correct SSL_CERT_FILE or "
            "SSL_CERT_DIR."
        ) from error


@dataclass(slots=True)
class _Lookup(Generic[_Answer]):
    """One question to several endpoints, each in a thread of its own.

    A thread keeps the deadline where an HTTP client cannot: its timeouts count per address and per
    read and cover no name resolution, which alone may take 20 s where DNS is filtered.
    """

    endpoints: Sequence[str]
    unreached_before: frozenset[str]
    ask: Callable[[str, ApiRequest], _Answer]
    patience: LookupPatience
    trust: ssl.SSLContext
    answers: dict[str, _Answer] = field(default_factory=dict)
    failures: dict[str, StoreError] = field(default_factory=dict)
    _stages: dict[str, _Stage] = field(default_factory=dict)
    _events: queue.SimpleQueue[tuple[str, _Answer | StoreError | _Stage]] = field(default_factory=queue.SimpleQueue)

    def run(self, reporter: Reporter) -> None:
        start_s = time.monotonic()
        for endpoint in self.endpoints:
            thread = threading.Thread(target=self._ask, args=(endpoint, start_s), name="hub-lookup", daemon=True)
            thread.start()
        found_s: float | None = None
        while True:
            now_s = time.monotonic()
            found_s = found_s if found_s is not None or not self.answers else now_s
            end_s = self._end_s(start_s, found_s)
            if now_s >= end_s:
                break
            reporter.raise_if_cancelled()
            self._take_event(min(_POLL_INTERVAL_S, end_s - now_s))
        for endpoint in self._pending():
            waited_s = self._allowed_s(endpoint)
            self.failures[endpoint] = HubUnreachable(f"{endpoint} did not answer within {waited_s:g} s; try again.")

    def is_unreached(self, endpoint: str) -> bool:
        """Whether an endpoint neither answered nor seemed about to."""
        return isinstance(self.failures.get(endpoint), HubUnreachable) and self._stage(endpoint) != _Stage.ANSWERING

    def _end_s(self, start_s: float, found_s: float | None) -> float:
        """When waiting makes no more sense, in monotonic seconds."""
        if found_s is None:
            return max((start_s + self._allowed_s(endpoint) for endpoint in self._pending()), default=start_s)
        hopeful = [endpoint for endpoint in self._pending() if endpoint not in self.unreached_before]
        return max((found_s + self._grace_s(endpoint) for endpoint in hopeful), default=start_s)

    def _allowed_s(self, endpoint: str) -> float:
        patience = self.patience
        by_stage = {_Stage.ASKED: patience.connect_s, _Stage.CONNECTED: patience.begin_s}
        return by_stage.get(self._stage(endpoint), patience.answer_s)

    def _grace_s(self, endpoint: str) -> float:
        is_connected = self._stage(endpoint) != _Stage.ASKED
        return self.patience.connected_grace_s if is_connected else self.patience.grace_s

    def _stage(self, endpoint: str) -> _Stage:
        return self._stages.get(endpoint, _Stage.ASKED)

    def _pending(self) -> list[str]:
        return [
            endpoint for endpoint in self.endpoints if endpoint not in self.answers and endpoint not in self.failures
        ]

    def _ask(self, endpoint: str, start_s: float) -> None:
        request = ApiRequest(
            timeout_s=self.patience.answer_s,
            deadline_s=start_s + self.patience.answer_s,
            trust=self.trust,
            on_connect=lambda: self._events.put((endpoint, _Stage.CONNECTED)),
            on_answer=lambda: self._events.put((endpoint, _Stage.ANSWERING)),
        )
        try:
            self._events.put((endpoint, self.ask(endpoint, request)))
        except StoreError as error:
            self._events.put((endpoint, error))

    def _take_event(self, timeout_s: float) -> None:
        try:
            endpoint, outcome = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return
        if isinstance(outcome, _Stage):
            self._stages[endpoint] = max(outcome, self._stage(endpoint))
        elif isinstance(outcome, StoreError):
            self.failures[endpoint] = outcome
        else:
            self.answers[endpoint] = outcome


def _nobody_has_it(lookup: _Lookup[_Answer], how_to_change_endpoint: str) -> StoreError:
    """One error for all: the most telling kind, the reasons of everyone."""
    failures = [lookup.failures[endpoint] for endpoint in lookup.endpoints]
    for kind in (AccessDenied, ModelNotFound):
        told = [failure for failure in failures if isinstance(failure, kind)]
        if told:
            others = [failure.reason for failure in failures if failure is not told[0]]
            reason, _, next_step = told[0].message.partition(";")
            return kind(f"{' and '.join([reason, *others])};{next_step}")
    tried = " and ".join(failure.reason for failure in failures) or "no endpoint is configured"
    return HubUnreachable(f"The model hub cannot be reached: {tried}; {how_to_change_endpoint}.")
