"""`Mirrors`: which address of one file is asked now, and when to go on to the next.

Pure bookkeeping with no lock and no network; the schedule keeps one for each file.  What it learns
about a whole host it shares with the other files through `unusable`.
"""

from __future__ import annotations

import httpx

from store.errors import DownloadFailed, StoreError
from store.transfer.credentials import origin_of
from store.transfer.policy import RetryPolicy
from store.transfer.remote_file import RemoteFile


class Mirrors:
    """The addresses of `file` in order of preference; `unusable` says by origin why nobody asks there any more."""

    def __init__(self, file: RemoteFile, policy: RetryPolicy, unusable: dict[str, StoreError]) -> None:
        self._label = file.label
        self._urls = file.urls
        self._policy = policy
        self._unusable = unusable
        self._refused: dict[str, StoreError] = {}
        self._failed_at_s = float("-inf")
        self.failures = 0
        """Attempts in a row that brought no byte from the current address."""

    @property
    def current(self) -> str | None:
        """The address to ask; None when there is none left."""
        return next(iter(self._left()), None)

    @property
    def is_last(self) -> bool:
        """Whether nothing is left to go on to."""
        return len(self._left()) <= 1

    def progressed(self) -> None:
        """Bytes came."""
        self.failures = 0

    def failed(self, url: str, reason: str, began_s: float, now_s: float) -> None:
        """An attempt that began at `began_s` brought nothing.

        Several connections that broke at one moment count once.
        """
        if url != self.current or began_s < self._failed_at_s:
            return
        self.failures += 1
        self._failed_at_s = now_s
        attempts = self._policy.attempts
        if self.failures >= (attempts if self.is_last else min(attempts, self._policy.failover_attempts)):
            self.set_aside(
                url,
                DownloadFailed(
                    f"{self._label} could not be downloaded from {httpx.URL(url).host} in {self.failures} attempts "
                    f"({reason}); pull again to resume."
                ),
            )

    def refuse(self, url: str, error: StoreError) -> None:
        """This address does not give this file."""
        self._refused[url] = error
        self.failures = 0

    def set_aside(self, url: str, error: StoreError) -> None:
        """Nothing is to be asked of this host any more, for no file."""
        self._refused[url] = error
        self._unusable.setdefault(origin_of(url), error)
        self.failures = 0

    def error(self) -> StoreError:
        """Why no address is left, all reasons in one sentence."""
        errors: list[StoreError] = []
        for url in self._urls:
            error = self._refused.get(url) or self._unusable[origin_of(url)]
            if error.message not in [each.message for each in errors]:
                errors.append(error)
        last = errors[-1]
        if len(errors) == 1:
            return last
        return type(last)(", and ".join([each.reason for each in errors[:-1]] + [last.message]))

    def _left(self) -> list[str]:
        return [url for url in self._urls if url not in self._refused and origin_of(url) not in self._unusable]
