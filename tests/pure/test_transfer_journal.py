"""Ranges of a file, the journal that says which are there, and what a partial file is credited with."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.names import Digest
from store.transfer.extents import Extents
from store.transfer.journal import Journal, read_journal
from store.transfer.partial_file import JOURNAL_EVERY_BYTES, PartialClosed, PartialFile, credited_bytes
from store.transfer.remote_file import RemoteFile

SIZE = 64
MIB = 1024 * 1024
RANGES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=12)
BIG = RemoteFile("big.gguf", ("http://127.0.0.1:1/big.gguf",), 32 * MIB, Digest("ab" * 32))


@given(RANGES, st.integers(0, SIZE))
def test_extents_agree_with_a_set_of_bytes(ranges: list[tuple[int, int]], size: int) -> None:
    held = {byte for start, end in ranges for byte in range(start, end)}
    extents = Extents(ranges)
    pairs = list(extents)
    assert extents.total_bytes == len(held)
    assert {byte for start, end in pairs for byte in range(start, end)} == held
    assert all(end < start for (_, end), (start, _) in pairwise(pairs)), "neighbours are joined"
    missing = [byte for start, end in extents.gaps(size) for byte in range(start, end)]
    assert missing == [byte for byte in range(size) if byte not in held]
    assert extents.frontier == next(byte for byte in range(SIZE + 1) if byte not in held)
    assert set(extents.clipped(size).copy()) == set(Extents((s, min(e, size)) for s, e in ranges if s < size))


def write_journal(path: Path, ranges: list[tuple[int, int]], boot: str = "boot") -> Journal:
    journal = Journal(path, SIZE, Extents(), boot)
    for start, end in ranges:
        journal.record(Extents([(start, end)]))
    return journal


@given(ranges=RANGES, cut=st.integers(0, 400), num_zeros=st.integers(0, 20))
def test_a_torn_journal_never_vouches_for_more_than_was_recorded(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[tuple[int, int]], cut: int, num_zeros: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "torn.journal"
    write_journal(path, ranges).close()
    whole = read_journal(path, SIZE, "boot")
    assert whole is not None
    assert list(whole) == list(Extents(ranges))
    text = path.read_bytes()
    path.write_bytes(text[:cut] + bytes(num_zeros) + b"\n+ 1 2\n")
    torn = read_journal(path, SIZE, "boot") or Extents()
    assert {b for s, e in torn for b in range(s, e)} <= {b for s, e in whole for b in range(s, e)} | {1}


def test_nonsense_in_a_journal_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    lines = b"+ 0 10\n+ 5\n+ 20 15\n+ 0 9999999999\n+ 1 2 3\n\0\0\0\n+ -1 4\n+ 30 40\n+ 50 6"
    path.write_bytes(b"quire-journal 1 64 boot\n" + lines)
    assert list(read_journal(path, 64, "boot") or ()) == [(0, 10), (30, 40)]
    assert read_journal(path, 65, "boot") is None, "another size is another file"
    path.write_bytes(b"\xff" * 100)
    assert read_journal(path, 64, "boot") is None
    assert read_journal(tmp_path / "none.journal", 64, "boot") is None


def test_after_another_boot_only_what_was_synced_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    journal = write_journal(path, [(0, 10), (20, 30)])
    synced = journal.length
    journal.record(Extents([(40, 50)]))
    journal.mark_synced(synced)
    journal.record(Extents([(60, 64)]))
    journal.close()
    assert list(read_journal(path, SIZE, "boot") or ()) == [(0, 10), (20, 30), (40, 50), (60, 64)]
    assert list(read_journal(path, SIZE, "later boot") or ()) == [(0, 10), (20, 30)]


def test_a_new_journal_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    write_journal(path, [(0, 10)]).close()
    Journal(path, SIZE, Extents([(0, 10), (20, 30)]), "boot").close()
    assert list(read_journal(path, SIZE, "boot") or ()) == [(0, 10), (20, 30)]
    assert list(tmp_path.iterdir()) == [path]


def write(partial: PartialFile, start: int, end: int) -> None:
    assert partial.write(memoryview(bytes(end - start)), start) == end


def test_a_killed_process_loses_little(tmp_path: Path) -> None:
    partial = PartialFile(BIG, tmp_path)
    for start in range(0, 8 * MIB, MIB // 2):
        write(partial, start, start + MIB // 2)
        write(partial, start + 16 * MIB, start + 16 * MIB + MIB // 2)
        assert credited_bytes(tmp_path, BIG) > partial.done_bytes - JOURNAL_EVERY_BYTES
    again = PartialFile(BIG, tmp_path)
    assert again.missing_besides([(24 * MIB, 32 * MIB)]) == [(8 * MIB, 16 * MIB)]
    assert (again.resumed_bytes, again.frontier, again.is_complete) == (16 * MIB, 8 * MIB, False)


def test_closing_records_everything_and_ends_all_writing(tmp_path: Path) -> None:
    partial = PartialFile(BIG, tmp_path)
    write(partial, 0, 1000)
    write(partial, 5000, 6000)
    partial.close()
    assert credited_bytes(tmp_path, BIG) == 2000
    with pytest.raises(PartialClosed):
        write(partial, 2000, 3000)
    with pytest.raises(PartialClosed):
        partial.sync()
    partial.close()
    partial.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_finished_file_leaves_no_journal_and_is_credited_in_full(tmp_path: Path) -> None:
    partial = PartialFile(BIG, tmp_path)
    for start in range(0, 32 * MIB, 4 * MIB):
        write(partial, start, start + 4 * MIB)
        partial.sync()
    assert partial.is_complete
    partial.finish()
    assert list(tmp_path.iterdir()) == [partial.path]
    assert credited_bytes(tmp_path, BIG) == 32 * MIB


def test_without_a_journal_only_a_prefix_that_a_digest_will_check_counts(tmp_path: Path) -> None:
    path = BIG.partial_path(tmp_path)
    path.write_bytes(b"x" * 100_000)
    assert credited_bytes(tmp_path, BIG) == 100_000
    with path.open("r+b") as file:
        file.truncate(8 * MIB)
    assert credited_bytes(tmp_path, BIG) == 0, "a file with holes is no prefix"
    path.write_bytes(b"x" * (BIG.size_bytes or 0) + b"more")
    assert credited_bytes(tmp_path, BIG) == 0
    tagged = RemoteFile("tagged.gguf", BIG.urls, 32 * MIB, etag="tag")
    tagged.partial_path(tmp_path).write_bytes(b"x" * 100_000)
    assert credited_bytes(tmp_path, tagged) == 0


def test_a_journal_does_not_vouch_for_bytes_behind_the_end_of_the_file(tmp_path: Path) -> None:
    partial = PartialFile(BIG, tmp_path)
    write(partial, 0, 4 * MIB)
    partial.close()
    os.truncate(partial.path, MIB)
    assert credited_bytes(tmp_path, BIG) == MIB
    partial.path.unlink()
    assert credited_bytes(tmp_path, BIG) == 0


def test_a_weak_entity_tag_is_never_resumed(tmp_path: Path) -> None:
    weak = RemoteFile("weak.json", BIG.urls, 4 * MIB, etag="W/tag")
    partial = PartialFile(weak, tmp_path)
    write(partial, 0, 3 * MIB)
    partial.close()
    assert credited_bytes(tmp_path, weak) == 0


def test_a_full_disk_keeps_the_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = PartialFile(BIG, tmp_path)
    write(partial, 0, 3 * MIB)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("store.transfer.partial_file.os.pwrite", full)
        patch.setattr("store.transfer.journal.os.write", full)
        with pytest.raises(OSError, match="No space"):
            write(partial, 3 * MIB, 4 * MIB)
        partial.close()
    assert credited_bytes(tmp_path, BIG) == 3 * MIB
