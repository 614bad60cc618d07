"""Which range is fetched next: whatever order things happen in, every byte once and no two connections on one."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.names import Digest
from store.transfer.file_transfer import Claim, FileTransfer
from store.transfer.mirrors import Mirrors
from store.transfer.policy import RetryPolicy, TransferShape
from store.transfer.remote_file import RemoteFile

CONTENT = random.Random(2).randbytes(3000)
SHAPE = TransferShape(range_bytes=500, min_split_bytes=50, split_after_s=0.0)
FILE = RemoteFile("f", ("http://one/f",), len(CONTENT), Digest(hashlib.sha256(CONTENT).hexdigest()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("claims")


def receive(claim: Claim, num_bytes: int) -> int:
    """Bytes written for the claim, no more than it may have by now."""
    end = min(claim.position + num_bytes, claim.end)
    before = claim.position
    claim.position = claim.partial.write(memoryview(CONTENT)[claim.position : end], claim.position)
    return claim.position - before


@given(st.lists(st.tuples(st.sampled_from(["claim", "split", "receive", "break"]), st.integers(0, 700)), max_size=60))
def test_every_byte_comes_once(folder: Path, steps: list[tuple[str, int]]) -> None:
    transfer = FileTransfer(FILE, folder, Mirrors(FILE, RetryPolicy(), {}))
    transfer.supports_ranges = True
    received = 0
    for number, (step, size) in enumerate([*steps, *[("claim", 0), ("receive", 700)] * 100]):
        claims = transfer.claims
        if step == "claim":
            transfer.next_claim(SHAPE, float(number))
        elif step == "split":
            transfer.split_claim(SHAPE, float(number))
        elif claims:
            claim = claims[size % len(claims)]
            received += receive(claim, size)
            if step == "break" or claim.position == claim.end:
                claims.remove(claim)
        busy = sorted((claim.position, claim.end) for claim in claims)
        assert all(end <= start for (_, end), (start, _) in pairwise(busy))
    assert received == len(CONTENT)
    assert transfer.partial is not None
    assert transfer.partial.is_complete
    assert transfer.partial.path.read_bytes() == CONTENT
    assert transfer.next_claim(SHAPE, 1e9) is None
    transfer.start_anew(FILE)
    assert list(folder.iterdir()) == []


def new_transfer(folder: Path) -> FileTransfer:
    return FileTransfer(FILE, folder, Mirrors(FILE, RetryPolicy(), {}))


def test_until_a_server_is_known_to_know_ranges_it_gets_one_connection(tmp_path: Path) -> None:
    transfer = new_transfer(tmp_path)
    first = transfer.next_claim(SHAPE, 0.0)
    assert first is not None
    assert (first.start, first.end, first.is_whole) == (0, 500, False)
    assert transfer.next_claim(SHAPE, 0.0) is None
    assert transfer.split_claim(SHAPE, 1.0) is None
    transfer.supports_ranges = True
    second = transfer.next_claim(SHAPE, 0.0)
    assert second is not None
    assert (second.start, second.end) == (500, 1000)
    assert not transfer.accept_whole(second), "not while another connection works on it"
    transfer.claims.remove(second)
    receive(first, 200)
    assert transfer.accept_whole(first)
    assert (first.start, first.position, first.end) == (200, 200, 3000)


def test_a_pause_holds_for_all_connections(tmp_path: Path) -> None:
    transfer = new_transfer(tmp_path)
    transfer.retry_at_s = 5.0
    assert transfer.next_claim(SHAPE, 4.9) is None
    assert transfer.next_claim(SHAPE, 5.0) is not None


def test_a_fresh_start_makes_older_claims_void(tmp_path: Path) -> None:
    transfer = new_transfer(tmp_path)
    claim = transfer.next_claim(SHAPE, 0.0)
    assert claim is not None
    receive(claim, 100)
    transfer.start_anew(FILE)
    assert not claim.is_current
    assert list(tmp_path.iterdir()) == []
    again = transfer.next_claim(SHAPE, 0.0)
    assert again is not None
    assert (again.position, transfer.done_bytes) == (0, 0)
