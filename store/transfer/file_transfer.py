"""`FileTransfer`: how far one file is, and which of its ranges is to be fetched next.

Holds no lock and starts no thread: the schedule guards it.  Knows no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from store.digests import DigestCheck
from store.transfer.credentials import origin_of
from store.transfer.mirrors import Mirrors
from store.transfer.partial_file import PartialFile
from store.transfer.policy import MIB, TransferShape
from store.transfer.remote_file import RemoteFile

_MIN_HASH_BYTES = MIB
_MAX_HASH_BYTES = 32 * MIB


@dataclass(eq=False, slots=True)
class Claim:
    """The bytes from `position` to `end`, which one connection fetches from `url`; `end` may come nearer meanwhile.

    With `is_whole` the file is asked for from its first byte on, because the server knows no ranges or because the
    range is all of it; what lies before `start` is then passed over.
    """

    transfer: FileTransfer
    file: RemoteFile
    partial: PartialFile
    url: str
    start: int
    end: int
    is_whole: bool
    began_s: float
    position: int

    @property
    def is_current(self) -> bool:
        """False once the file was started anew without this claim."""
        return self.transfer.partial is self.partial


@dataclass(frozen=True, slots=True)
class HashJob:
    """The bytes up to `end`, which are there without a hole, are to be hashed."""

    transfer: FileTransfer
    partial: PartialFile
    check: DigestCheck | None
    end: int


class FileTransfer:
    """One file on its way."""

    def __init__(self, file: RemoteFile, folder: Path, mirrors: Mirrors) -> None:
        self.file = file
        self.mirrors = mirrors
        self.partial: PartialFile | None = None
        self.claims: list[Claim] = []
        self.supports_ranges: bool | None = None
        """Whether the current address does; None until its first answer."""
        self.retry_at_s = 0.0
        self.is_verified = False
        self.num_changes = 0
        self.one_source_only = False
        """After bytes of several sources did not fit together they are no longer mixed."""
        self._folder = folder
        self._check: DigestCheck | None = None
        self._is_being_hashed = False
        self._sources: dict[str, str] = {}
        """By origin, an address that bytes came from."""
        self._reached_bytes = 0

    @property
    def size_bytes(self) -> int:
        assert self.file.size_bytes is not None, "a file is identified before it is fetched"
        return self.file.size_bytes

    @property
    def done_bytes(self) -> int:
        return self.partial.done_bytes if self.partial is not None else 0

    @property
    def hashed_bytes(self) -> int:
        return self._check.hashed_bytes if self._check is not None else self.done_bytes

    @property
    def is_mixed(self) -> bool:
        """Whether the bytes came from more than the one address and this one run."""
        return len(self._sources) > 1 or (self.partial is not None and self.partial.resumed_bytes > 0)

    @property
    def source_url(self) -> str | None:
        """Where the latest bytes came from, else where the next ones would.

        Bytes can be hashed before they are noted: then they are those of a claim that has not ended.
        """
        claimed = self.claims[-1].url if self.claims else self.mirrors.current
        return next(reversed(self._sources.values()), claimed)

    def next_claim(self, shape: TransferShape, now_s: float) -> Claim | None:
        """The first range that nobody fetches yet, if it may be asked for now.  Raises OSError."""
        url = self.mirrors.current
        if self.is_verified or url is None or now_s < self.retry_at_s:
            return None
        if self.claims and not self.supports_ranges:
            return None
        partial = self._opened()
        missing = partial.missing_besides([(claim.position, claim.end) for claim in self.claims])
        if not missing:
            return None
        start, end = missing[0]
        if self.supports_ranges is False or not self.file.is_resumable:
            return self._claim(url, start, self.size_bytes, now_s, is_whole=True)
        end = min(end, start + shape.range_bytes)
        return self._claim(url, start, end, now_s, is_whole=end - start == self.size_bytes)

    def split_claim(self, shape: TransferShape, now_s: float) -> Claim | None:
        """The second half of a range that another connection would take long for."""
        if not self.supports_ranges or now_s < self.retry_at_s:
            return None
        for claim in self.claims:
            left = claim.end - claim.position
            elapsed_s = now_s - claim.began_s
            rate = (claim.position - claim.start) / elapsed_s if elapsed_s > 0 else 0.0
            url = self.mirrors.current
            if left < 2 * shape.min_split_bytes or elapsed_s < shape.split_after_s or url is None:
                continue
            if left > rate * shape.split_after_s:
                middle = claim.position + left // 2
                end, claim.end = claim.end, middle
                return self._claim(url, middle, end, now_s, is_whole=False)
        return None

    def accept_whole(self, claim: Claim) -> bool:
        """The server sends all of the file where a range was asked: take it, if nobody else works on it."""
        if self.claims != [claim]:
            self.supports_ranges = None
            return False
        self.supports_ranges = False
        claim.is_whole = True
        claim.start = claim.position = claim.partial.frontier
        claim.end = self.size_bytes
        return True

    def next_hash_job(self) -> HashJob | None:
        """Bytes to hash, enough to be worth it or the last; an empty job when only the verdict is left."""
        if self.partial is None or self._is_being_hashed or self.is_verified:
            return None
        is_complete = self.partial.is_complete
        frontier = self.partial.frontier
        if not is_complete and (self._check is None or frontier - self._check.hashed_bytes < _MIN_HASH_BYTES):
            return None
        self._is_being_hashed = True
        hashed = self._check.hashed_bytes if self._check is not None else 0
        return HashJob(self, self.partial, self._check, min(frontier, hashed + _MAX_HASH_BYTES))

    def end_hash_job(self, job: HashJob) -> bool:
        """Whether the verdict can be given now."""
        if self.partial is not job.partial:
            return False
        self._is_being_hashed = False
        return job.partial.is_complete and (job.check is None or job.check.hashed_bytes == job.partial.size_bytes)

    def start_anew(self, file: RemoteFile) -> None:
        """Forget all bytes; claims on them come to nothing.  Raises OSError."""
        if self.partial is not None:
            self.partial.discard()
        self.file = file
        self.partial = None
        self.claims.clear()
        self.supports_ranges = None
        self._check = None
        self._is_being_hashed = False
        self._sources.clear()
        self._reached_bytes = 0

    def note_source(self, url: str) -> None:
        """Bytes came from this address."""
        self._sources.setdefault(origin_of(url), url)

    def is_alive(self) -> bool:
        """Whether bytes to keep have arrived since this was last asked, or another connection brings some now.

        A server that allows few connections refuses some while it serves others: that is no reason to give up.
        """
        before, self._reached_bytes = self._reached_bytes, self.done_bytes
        has_grown = self._reached_bytes > before
        return self.file.is_resumable and (has_grown or any(claim.position > claim.start for claim in self.claims))

    def _opened(self) -> PartialFile:
        if self.partial is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.partial = PartialFile(self.file, self._folder)
            self._reached_bytes = self.partial.done_bytes
            if self.file.digest is not None:
                self._check = DigestCheck(self.file.digest, self.size_bytes)
        return self.partial

    def _claim(self, url: str, start: int, end: int, now_s: float, *, is_whole: bool) -> Claim:
        assert self.partial is not None, "a range of an open file"
        claim = Claim(self, self.file, self.partial, url, start, end, is_whole, now_s, start)
        self.claims.append(claim)
        return claim
