"""Large files in ranges over several connections, several mirrors, and servers that fail in the middle."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from store.errors import BrokenFile, Cancelled, DownloadFailed, NotEnoughSpace
from store.names import Digest
from store.progress import PullProgress, Reporter
from store.transfer import (
    Credentials,
    Downloader,
    FetchedFile,
    RateLimit,
    RemoteFile,
    RetryPolicy,
    TransferShape,
    credited_bytes,
)
from tests.fakes.hub import COMMIT, FakeHub, sha256, unused_endpoint

KIB = 1024
SIZE = 1_000_000
CONTENT = random.Random(11).randbytes(SIZE)
SMALL = {f"part-{number}.json": random.Random(number).randbytes(3000 + number) for number in range(12)}
SHAPE = TransferShape(connections=4, range_bytes=64 * KIB, min_split_bytes=16 * KIB)
POLICY = RetryPolicy(attempts=3, first_delay_s=0.0, max_delay_s=0.0, connect_timeout_s=2.0, stall_timeout_s=5.0)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("org/repo", {"model.gguf": CONTENT} | SMALL)
        yield hub


@pytest.fixture
def mirror() -> Iterator[FakeHub]:
    with FakeHub() as mirror:
        mirror.add("org/repo", {"model.gguf": CONTENT} | SMALL)
        yield mirror


def url(endpoint: str, name: str = "model.gguf") -> str:
    return f"{endpoint}/org/repo/resolve/{COMMIT}/{name}"


def remote(*endpoints: str, name: str = "model.gguf", content: bytes = CONTENT) -> RemoteFile:
    return RemoteFile(name, tuple(url(each, name) for each in endpoints), len(content), Digest(sha256(content)))


@contextmanager
def downloading(
    seen: list[PullProgress] | None = None,
    *,
    policy: RetryPolicy = POLICY,
    shape: TransferShape = SHAPE,
    limit: RateLimit | None = None,
    cancel_at_bytes: int | None = None,
) -> Iterator[Downloader]:
    reports: list[PullProgress] = [] if seen is None else seen

    def is_cancelled() -> bool:
        return cancel_at_bytes is not None and any(report.done_bytes >= cancel_at_bytes for report in reports)

    reporter = Reporter(reports.append, is_cancelled)
    with Downloader(reporter, credentials=Credentials(), policy=policy, shape=shape, limit=limit) as downloader:
        yield downloader


def fetch(downloader: Downloader, folder: Path, *files: RemoteFile) -> list[FetchedFile]:
    fetched: list[FetchedFile] = []
    downloader.fetch(files, folder, fetched.append)
    assert [each.path for each in fetched if each.path.with_suffix(".journal").exists()] == []
    return fetched


def starts(hub: FakeHub, name: str = "model.gguf") -> list[int]:
    """Where the answers to GET requests began, sorted."""
    ranges = [seen.range for seen in hub.file_requests(name)]
    return sorted(int(each.removeprefix("bytes=").partition("-")[0]) if each else 0 for each in ranges)


def test_a_large_file_comes_in_ranges_each_of_them_once(hub: FakeHub, tmp_path: Path) -> None:
    with downloading() as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint))
    assert fetched.path.read_bytes() == CONTENT
    assert starts(hub) == list(range(0, SIZE, 64 * KIB))
    assert hub.sent_bytes == SIZE


def test_several_files_are_on_their_way_at_once(hub: FakeHub, tmp_path: Path) -> None:
    files = [remote(hub.endpoint, name=name, content=content) for name, content in SMALL.items()]
    seen: list[PullProgress] = []
    hub.faults.stall_after_bytes = [100]

    def on_complete(fetched: FetchedFile) -> None:
        assert fetched.path.read_bytes() == SMALL.get(fetched.file.label, CONTENT)
        done.add(fetched.file.label)
        if len(done) == len(SMALL):
            hub.released.set()  # the stalled one could only be waited for by one connection

    done: set[str] = set()
    with downloading(seen) as downloader:
        downloader.fetch([*files, remote(hub.endpoint)], tmp_path, on_complete)
    assert done == {"model.gguf", *SMALL}
    whole = SIZE + sum(map(len, SMALL.values()))
    assert (seen[-1].all_done_bytes, seen[-1].all_total_bytes) == (whole, whole)
    assert [report.all_done_bytes for report in seen if report.file] == sorted(
        report.all_done_bytes for report in seen if report.file
    )


def test_files_with_the_same_bytes_come_one_after_the_other(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/repo"].files["copy.gguf"] = CONTENT
    moved: list[str] = []

    def move(fetched: FetchedFile) -> None:
        assert fetched.path.read_bytes() == CONTENT
        fetched.path.rename(tmp_path / fetched.file.label)
        moved.append(fetched.file.label)

    with downloading() as downloader:
        downloader.fetch([remote(hub.endpoint), remote(hub.endpoint, name="copy.gguf")], tmp_path, move)
    assert moved == ["model.gguf", "copy.gguf"]


def test_an_empty_file_and_no_files(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/repo"].files["empty"] = b""
    with downloading() as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint, name="empty", content=b""))
        assert fetched.path.read_bytes() == b""
        assert fetch(downloader, tmp_path) == []
    assert hub.requests == []


@pytest.mark.parametrize("drop_every_bytes", [7_000, 50_000, 64 * KIB - 1])
def test_connections_that_break_again_and_again_cost_nothing_twice(
    hub: FakeHub, tmp_path: Path, drop_every_bytes: int
) -> None:
    hub.faults.drop_every_bytes = drop_every_bytes
    with downloading() as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint))
    assert fetched.path.read_bytes() == CONTENT
    assert hub.sent_bytes == SIZE


def test_a_server_without_ranges_gets_one_connection(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.ignore_range = True
    with downloading() as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint))
    assert fetched.path.read_bytes() == CONTENT
    assert len(hub.file_requests()) == 1
    assert hub.sent_bytes == SIZE


def test_without_ranges_a_broken_stream_begins_again_and_ends(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.ignore_range = True
    hub.faults.drop_after_bytes = [400_000, 200_000, 700_000]
    with downloading() as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint))
    assert fetched.path.read_bytes() == CONTENT


def test_a_server_that_forgets_ranges_in_the_middle(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.stall_after_bytes = [None] * 5 + [1000]
    seen: list[PullProgress] = []
    policy = replace(POLICY, stall_timeout_s=0.3, attempts=20)

    class Forgetful(list[PullProgress]):
        def append(self, report: PullProgress) -> None:
            super().append(report)
            hub.faults.ignore_range = report.done_bytes > 100_000

    with downloading(Forgetful(seen), policy=policy) as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint))
    assert fetched.path.read_bytes() == CONTENT


def test_a_cancelled_download_goes_on_where_each_range_stopped(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.stall_after_bytes = [None] * 6 + [40_000] * 4
    with downloading(cancel_at_bytes=6 * 64 * KIB + 4 * 40_000) as downloader, pytest.raises(Cancelled):
        fetch(downloader, tmp_path, remote(hub.endpoint))
    credited = credited_bytes(tmp_path, remote(hub.endpoint))
    assert credited == 6 * 64 * KIB + 4 * 40_000
    hub.faults.stall_after_bytes = []
    already_sent = hub.sent_bytes
    with downloading() as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint))
    assert fetched.path.read_bytes() == CONTENT
    assert hub.sent_bytes - already_sent == SIZE - credited


def test_cancelling_does_not_wait_for_a_server_that_says_nothing(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.stall_everything = True
    policy = replace(POLICY, stall_timeout_s=600.0)
    reporter = Reporter(lambda _: None, hub.stalled.is_set)
    with Downloader(reporter, credentials=Credentials(), policy=policy) as downloader:
        with pytest.raises(Cancelled):
            fetch(downloader, tmp_path, remote(hub.endpoint))
        with pytest.raises(Cancelled):
            downloader.read_range(remote(hub.endpoint), 0, 100)


def test_a_dripping_connection_is_replaced(hub: FakeHub, tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    hub.faults.drip_bytes_per_s = 2000
    policy = replace(POLICY, slow_bytes_per_s=100_000, slow_window_s=0.2)

    class Recovering(list[PullProgress]):
        def append(self, report: PullProgress) -> None:
            seen.append(report)
            if "bytes per second came" in report.status:
                hub.faults.drip_bytes_per_s = None

    with downloading(Recovering(), policy=policy) as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint))
    assert fetched.path.read_bytes() == CONTENT
    assert hub.faults.drip_bytes_per_s is None


def test_a_dead_mirror_gives_way_for_all_files(hub: FakeHub, tmp_path: Path) -> None:
    dead = unused_endpoint()
    files = [remote(dead, hub.endpoint, name=name, content=content) for name, content in SMALL.items()]
    with downloading() as downloader:
        fetched = fetch(downloader, tmp_path, remote(dead, hub.endpoint), *files)
    assert len(fetched) == 1 + len(SMALL)


def test_another_mirror_goes_on_in_the_middle_of_the_file(hub: FakeHub, mirror: FakeHub, tmp_path: Path) -> None:
    hub.faults.drop_after_bytes = [None, None, None, None, *[30_000] * 4, *[0] * 40]
    seen: list[PullProgress] = []
    with downloading(seen) as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint, mirror.endpoint))
    assert fetched.path.read_bytes() == CONTENT
    assert hub.sent_bytes + mirror.sent_bytes == SIZE
    assert min(hub.sent_bytes, mirror.sent_bytes) > 0


def test_without_a_digest_mirrors_mix_only_under_one_entity_tag(hub: FakeHub, mirror: FakeHub, tmp_path: Path) -> None:
    other = CONTENT[::-1]
    tagged = replace(remote(hub.endpoint, mirror.endpoint), digest=None, size_bytes=None)
    for content in (CONTENT, other):
        mirror.repos["org/repo"].files["model.gguf"] = content
        hub.faults.drop_after_bytes = [None, None, 30_000, *[0] * 40]
        mirror.sent_bytes = 0
        with downloading() as downloader:
            [fetched] = fetch(downloader, tmp_path, downloader.identify(tagged))
        assert fetched.path.read_bytes() == content
        assert (mirror.sent_bytes >= SIZE) == (content == other), "another tag starts the file anew"
        fetched.path.unlink()


def test_a_mirror_with_wrong_bytes_is_not_asked_again(hub: FakeHub, mirror: FakeHub, tmp_path: Path) -> None:
    hub.faults.wrong_bytes = True
    with downloading() as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint, mirror.endpoint))
        assert fetched.path.read_bytes() == CONTENT
        assert hub.sent_bytes == mirror.sent_bytes == SIZE
        name, content = next(iter(SMALL.items()))
        fetch(downloader, tmp_path, remote(hub.endpoint, mirror.endpoint, name=name, content=content))
    assert len(hub.file_requests(name)) == 0
    mirror.faults.wrong_bytes = True
    fetched.path.unlink()
    with downloading() as downloader, pytest.raises(BrokenFile, match="is not what was promised"):
        fetch(downloader, tmp_path, remote(hub.endpoint, mirror.endpoint))
    assert not fetched.path.exists()


def test_bytes_of_two_mirrors_that_do_not_fit_are_fetched_again_from_one(
    hub: FakeHub, mirror: FakeHub, tmp_path: Path
) -> None:
    hub.faults.wrong_bytes = True
    hub.faults.drop_after_bytes = [None, None, 30_000, *[0] * 40]
    with downloading() as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint, mirror.endpoint))
    assert fetched.path.read_bytes() == CONTENT


def test_a_file_that_changes_midway_starts_anew_alone(hub: FakeHub, tmp_path: Path) -> None:
    newer = CONTENT[::-1] + b"longer"
    hub.faults.drop_after_bytes = [None, None, 30_000]
    hub.faults.contents_after_cut = {"model.gguf": newer}
    name, content = next(iter(SMALL.items()))
    with downloading() as downloader:
        tagged = downloader.identify(replace(remote(hub.endpoint), digest=None, size_bytes=None))
        fetched = fetch(downloader, tmp_path, tagged, remote(hub.endpoint, name=name, content=content))
    assert {each.file.label: each.path.read_bytes() for each in fetched} == {"model.gguf": newer, name: content}
    assert len(hub.file_requests(name)) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_a_server_that_is_busy_says_when_to_come_back(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.statuses = [None, 429, 503, 429]
    hub.faults.retry_after = "0"
    with downloading() as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint))
    assert fetched.path.read_bytes() == CONTENT
    hub.faults.statuses = [404]
    fetched.path.unlink()
    with downloading() as downloader, pytest.raises(DownloadFailed, match="HTTP status 404"):
        fetch(downloader, tmp_path, remote(hub.endpoint))


def test_a_server_that_allows_one_connection_still_gives_all(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.max_at_once = 1
    hub.faults.drip_bytes_per_s = 2_000_000
    policy = replace(POLICY, attempts=8, first_delay_s=0.02, max_delay_s=0.02)
    with downloading(policy=policy, shape=replace(SHAPE, range_bytes=500_000)) as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint))
    assert fetched.path.read_bytes() == CONTENT


def test_a_redirect_is_followed_once_for_all_ranges(hub: FakeHub, mirror: FakeHub, tmp_path: Path) -> None:
    hub.faults.redirect_files_to = mirror.endpoint
    with downloading() as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint))
        assert fetched.path.read_bytes() == CONTENT
        assert len(hub.file_requests()) < len(mirror.file_requests())
        # A signed address expires: the hub is asked for another one.
        fetched.path.unlink()
        asked = len(hub.file_requests())
        mirror.faults.statuses = [403]
        assert fetch(downloader, tmp_path, remote(hub.endpoint))[0].path.read_bytes() == CONTENT
        assert len(hub.file_requests()) > asked


def test_the_rate_limit_holds_over_all_connections(hub: FakeHub, tmp_path: Path) -> None:
    waited: list[float] = []

    class Counting(RateLimit):
        def delay_s(self, num_bytes: int) -> float:
            waited.append(super().delay_s(num_bytes))
            return 0.0

    with downloading(limit=Counting(100_000, clock=lambda: 0.0)) as downloader:
        fetch(downloader, tmp_path, remote(hub.endpoint))
    assert max(waited) == pytest.approx(SIZE / 100_000, abs=0.3)


def test_a_disk_that_fills_up_keeps_the_partial(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from store.transfer import partial_file

    real_write = partial_file.os.pwrite
    room = 400_000

    def write(descriptor: int, content: memoryview, offset: int) -> int:
        nonlocal room
        if len(content) > room:
            raise OSError(28, "No space left on device")
        room -= len(content)
        return real_write(descriptor, content, offset)

    with monkeypatch.context() as patch:
        patch.setattr(partial_file.os, "pwrite", write)
        with downloading() as downloader, pytest.raises(NotEnoughSpace, match="resumes where it stopped"):
            fetch(downloader, tmp_path, remote(hub.endpoint))
    credited = credited_bytes(tmp_path, remote(hub.endpoint))
    assert 200_000 < credited <= 400_000
    already_sent = hub.sent_bytes
    with downloading() as downloader:
        [fetched] = fetch(downloader, tmp_path, remote(hub.endpoint))
    assert fetched.path.read_bytes() == CONTENT
    assert hub.sent_bytes - already_sent == SIZE - credited


def test_a_failing_callback_ends_the_download(hub: FakeHub, tmp_path: Path) -> None:
    def refuse(_: FetchedFile) -> None:
        raise BrokenFile("nobody wants it; stop.")

    with downloading() as downloader, pytest.raises(BrokenFile, match="nobody wants it"):
        downloader.fetch([remote(hub.endpoint)], tmp_path, refuse)


@pytest.mark.parametrize("ignore_range", [False, True])
def test_headers_are_read_without_touching_the_disk(hub: FakeHub, mirror: FakeHub, ignore_range: bool) -> None:
    hub.faults.ignore_range = ignore_range
    hub.faults.statuses = [503]
    with downloading() as downloader:
        file = remote(unused_endpoint(), hub.endpoint)
        assert downloader.read_range(file, 1000, 500) == CONTENT[1000:1500]
        assert downloader.read_range(file, SIZE - 10, 500) == CONTENT[-10:]
        assert downloader.read_range(file, SIZE, 500) == b""
        with pytest.raises(ValueError, match="cannot be read at once"):
            downloader.read_range(file, 0, 1 << 40)
        hub.faults.statuses = [404]
        with pytest.raises(DownloadFailed, match="HTTP status 404"):
            downloader.read_range(file, 0, 10)
