"""The downloader against a hub that breaks connections, lies about ranges, changes files and redirects."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from store.errors import AccessDenied, BrokenFile, Cancelled, DownloadFailed, NotEnoughSpace
from store.names import Digest
from store.progress import PullProgress, Reporter
from store.space import require_free_space
from store.transfer import Credentials, Downloader, FetchedFile, RemoteFile, RetryPolicy, credited_bytes
from tests.fakes.hub import COMMIT, FakeHub, git_blob_id, sha256, unused_endpoint

CONTENT = random.Random(7).randbytes(300_000)
SMALL = b'{"model_type": "llama"}'
POLICY = RetryPolicy(attempts=3, first_delay_s=0.0, max_delay_s=0.0, connect_timeout_s=2.0, stall_timeout_s=5.0)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("org/repo", {"model.gguf": CONTENT, "config.json": SMALL})
        yield hub


def remote(hub: FakeHub, name: str = "model.gguf", content: bytes = CONTENT) -> RemoteFile:
    url = f"{hub.endpoint}/org/repo/resolve/{COMMIT}/{name}"
    return RemoteFile(name, (url,), len(content), Digest(sha256(content)))


def fetch(
    file: RemoteFile,
    folder: Path,
    *,
    origin: str | None = None,
    token: str | None = None,
    policy: RetryPolicy = POLICY,
    seen: list[PullProgress] | None = None,
    cancel_at_bytes: int | None = None,
) -> FetchedFile:
    reports = seen if seen is not None else []

    def is_cancelled() -> bool:
        return cancel_at_bytes is not None and any(report.done_bytes >= cancel_at_bytes for report in reports)

    reporter = Reporter(reports.append, is_cancelled)
    credentials = Credentials.of_endpoint(origin or file.urls[0], token)
    with Downloader(reporter, credentials=credentials, policy=policy) as downloader:
        return fetch_one(downloader, downloader.identify(file), folder)


def fetch_one(downloader: Downloader, file: RemoteFile, folder: Path) -> FetchedFile:
    fetched: list[FetchedFile] = []
    downloader.fetch([file], folder, fetched.append)
    return fetched[0]


def test_a_whole_file_arrives_verified(hub: FakeHub, tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    fetched = fetch(remote(hub), tmp_path, seen=seen)
    assert fetched.path == tmp_path / f"{sha256(CONTENT)}.partial"
    assert fetched.path.read_bytes() == CONTENT
    assert seen[-1] == PullProgress("verifying", "model.gguf", *[len(CONTENT)] * 4)
    assert PullProgress("downloading", "model.gguf", *[len(CONTENT)] * 4) in seen


def test_small_files_are_verified_by_their_git_blob_id(hub: FakeHub, tmp_path: Path) -> None:
    file = replace(remote(hub, "config.json", SMALL), digest=Digest(git_blob_id(SMALL)))
    assert fetch(file, tmp_path).path.read_bytes() == SMALL
    hub.faults.wrong_bytes = True
    (tmp_path / f"{file.blob_name}.partial").unlink()
    with pytest.raises(BrokenFile):
        fetch(file, tmp_path)


def test_dropped_connections_resume_where_they_stopped(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.drop_after_bytes = [100_000, 50_000, 0, 0]
    fetched = fetch(remote(hub), tmp_path)
    assert fetched.path.read_bytes() == CONTENT
    assert [seen.range for seen in hub.file_requests()] == [
        None, "bytes=100000-299999", "bytes=150000-299999", "bytes=150000-299999", "bytes=150000-299999",
    ]  # fmt: skip


def test_attempts_without_a_byte_of_progress_end_the_download(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.drop_after_bytes = [100_000, 0, 0, 0, 0]
    with pytest.raises(DownloadFailed, match=r"in 3 attempts.*pull again to resume"):
        fetch(remote(hub), tmp_path)
    assert (tmp_path / f"{sha256(CONTENT)}.partial").stat().st_size == 100_000


def test_a_stalled_connection_is_replaced(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.stall_after_bytes = [65_536]
    policy = replace(POLICY, stall_timeout_s=0.2)
    assert fetch(remote(hub), tmp_path, policy=policy).path.read_bytes() == CONTENT
    assert hub.file_requests()[1].range == "bytes=65536-299999"


def test_a_200_answer_to_a_range_request_is_taken_from_where_it_helps(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / f"{sha256(CONTENT)}.partial").write_bytes(CONTENT[:100_000])
    hub.faults.ignore_range = True
    assert fetch(remote(hub), tmp_path).path.read_bytes() == CONTENT
    assert [seen.range for seen in hub.file_requests()] == ["bytes=100000-299999"]


def test_a_complete_partial_needs_no_request(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / f"{sha256(CONTENT)}.partial").write_bytes(CONTENT)
    fetch(remote(hub), tmp_path)
    assert hub.requests == []


@pytest.mark.parametrize("spoilt", [b"x" * 100_000, b"x" * len(CONTENT), CONTENT + b"more"])
def test_a_spoilt_partial_is_fetched_anew_once(hub: FakeHub, tmp_path: Path, spoilt: bytes) -> None:
    (tmp_path / f"{sha256(CONTENT)}.partial").write_bytes(spoilt)
    assert fetch(remote(hub), tmp_path).path.read_bytes() == CONTENT
    assert hub.file_requests()[-1].range is None


def test_wrong_bytes_are_refused_and_leave_nothing(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.wrong_bytes = True
    with pytest.raises(BrokenFile, match=r"model\.gguf from 127\.0\.0\.1 is not what was promised"):
        fetch(remote(hub), tmp_path)
    assert len(hub.file_requests()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_never_stops_sending_is_cut_off(hub: FakeHub, tmp_path: Path) -> None:
    short = replace(remote(hub), size_bytes=1000)
    with pytest.raises(DownloadFailed, match="300000 bytes there instead of 1000"):
        fetch(short, tmp_path)
    assert (tmp_path / f"{sha256(CONTENT)}.partial").stat().st_size == 0


def test_busy_servers_are_asked_again_and_missing_files_are_not(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.statuses = [503, 429, 500]
    with pytest.raises(DownloadFailed, match="HTTP status 500"):
        fetch(remote(hub), tmp_path)
    hub.faults.statuses = [503, 429]
    assert fetch(remote(hub), tmp_path).path.read_bytes() == CONTENT
    num_requests = len(hub.requests)
    with pytest.raises(DownloadFailed, match="HTTP status 404"):
        fetch(replace(remote(hub, "missing.gguf"), digest=Digest("0" * 64)), tmp_path)
    assert len(hub.requests) == num_requests + 1


def test_without_a_digest_the_entity_tag_names_the_partial(hub: FakeHub, tmp_path: Path) -> None:
    file = replace(remote(hub), size_bytes=None, digest=None)
    hub.faults.drop_after_bytes = [100_000]
    fetched = fetch(file, tmp_path)
    assert fetched.path.read_bytes() == CONTENT
    assert fetched.file.etag == git_blob_id(CONTENT)
    assert fetched.path.name.startswith("etag-")
    assert hub.file_requests()[-1].range == "bytes=100000-299999"


def test_a_changed_entity_tag_restarts_the_file(hub: FakeHub, tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    newer = CONTENT[::-1]
    reporter = Reporter(seen.append, lambda: False)
    file = replace(remote(hub), size_bytes=None, digest=None)
    with Downloader(reporter, credentials=Credentials(), policy=POLICY) as downloader:
        identified = downloader.identify(file)
        (tmp_path / f"{identified.blob_name}.partial").write_bytes(CONTENT[:100_000])
        hub.repos["org/repo"].files["model.gguf"] = newer
        fetched = fetch_one(downloader, identified, tmp_path)
    assert fetched.path.read_bytes() == newer
    assert list(tmp_path.iterdir()) == [fetched.path]


def test_the_token_never_follows_a_redirect(hub: FakeHub, tmp_path: Path) -> None:
    with FakeHub() as delivery:
        delivery.add("org/repo", {"model.gguf": CONTENT})
        hub.faults.redirect_files_to = delivery.endpoint
        hub.faults.required_token = "hf_secret"
        assert fetch(remote(hub), tmp_path, token="hf_secret").path.read_bytes() == CONTENT
        assert [seen.authorization for seen in hub.requests] == ["Bearer hf_secret"]
        assert [seen.authorization for seen in delivery.requests] == [None]


def test_the_token_goes_to_its_own_origin_alone(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.required_token = "hf_secret"
    with pytest.raises(AccessDenied, match="set HF_TOKEN"):
        fetch(remote(hub), tmp_path, token="hf_secret", origin="http://127.0.0.1:1")
    assert [seen.authorization for seen in hub.requests] == [None]


def test_endless_redirects_end(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.redirect_files_to = hub.endpoint
    with pytest.raises(DownloadFailed, match="redirects more than 5 times"):
        fetch(remote(hub), tmp_path)


def test_redirects_lead_to_web_addresses_only(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.redirect_files_to = "file:///etc/passwd"
    with pytest.raises(DownloadFailed, match="unsafe file address"):
        fetch(remote(hub), tmp_path)


def test_nobody_listening_is_one_sentence(tmp_path: Path) -> None:
    file = RemoteFile("model.gguf", (f"{unused_endpoint()}/x",), 10, Digest("0" * 64))
    with pytest.raises(DownloadFailed, match="in 3 attempts"):
        fetch(file, tmp_path)


def test_cancelling_keeps_what_has_arrived(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.stall_after_bytes = [100_000]
    with pytest.raises(Cancelled):
        fetch(remote(hub), tmp_path, cancel_at_bytes=100_000)
    assert credited_bytes(tmp_path, remote(hub)) == 100_000
    assert fetch(remote(hub), tmp_path).path.read_bytes() == CONTENT
    assert hub.file_requests()[-1].range == "bytes=100000-299999"


def test_space_is_checked_with_a_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.space.shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**9}))
    require_free_space(0, tmp_path, "nothing")
    require_free_space(900_000_000, tmp_path, "model")
    with pytest.raises(NotEnoughSpace, match=r"needs 950 MB more but .* has 1.0 GB free") as caught:
        require_free_space(950_000_000, tmp_path, "model")
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (950_000_000, 10**9)
