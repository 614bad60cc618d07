"""The parts of a transfer that are plain arithmetic and bookkeeping: tokens, limits, headers, mirrors."""

from __future__ import annotations

from datetime import UTC, datetime

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import AccessDenied, DownloadFailed, StoreError
from store.names import Digest
from store.progress import PullProgress, Reporter
from store.transfer.connection import MAX_RETRY_AFTER_S, Answer, normalized_etag, retry_after_s
from store.transfer.credentials import Credentials, origin_of
from store.transfer.mirrors import Mirrors
from store.transfer.policy import RetryPolicy
from store.transfer.rate_limit import RateLimit
from store.transfer.remote_file import RemoteFile

POLICY = RetryPolicy(attempts=3, failover_attempts=2)
FIRST, SECOND = "https://one.example/f", "https://two.example/f"


def test_a_token_belongs_to_an_origin() -> None:
    credentials = Credentials({"https://Hub.example/some/path": "secret"})
    assert credentials.header_for("https://hub.example:443/a/b") == {"Authorization": "Bearer secret"}
    for other in (
        "http://hub.example/",
        "https://hub.example:444/",
        "https://hub.example.evil/",
        "https://x.hub.example",
    ):
        assert credentials.header_for(other) == {}
    assert "secret" not in repr(credentials)
    assert Credentials.of_endpoint("https://hub.example", None).header_for("https://hub.example") == {}
    assert origin_of("HTTP://A.example") == origin_of("http://a.example:80/x")


NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5.0),
        ("86400", MAX_RETRY_AFTER_S),
        ("Sat, 21 Nov 2026 12:00:07 GMT", 7.0),
        ("Sat, 21 Nov 2026 12:00:07", 7.0),
        ("Sat, 21 Nov 2026 11:00:00 GMT", 0.0),
        ("Fri, 31 Dec 2099 00:00:00 GMT", MAX_RETRY_AFTER_S),
        ("soon", 0.0),
        ("", 0.0),
        ("-3", 0.0),
    ],
)
def test_retry_after_counts_seconds_or_names_a_date(text: str, seconds: float) -> None:
    assert retry_after_s(text, NOW) == seconds


@given(st.text())
def test_retry_after_takes_whatever_comes(text: str) -> None:
    assert 0.0 <= retry_after_s(text, NOW) <= MAX_RETRY_AFTER_S


def test_entity_tags_say_whether_they_are_weak() -> None:
    assert normalized_etag('"abc"') == "abc"
    assert normalized_etag('W/"abc"') == "W/abc"
    assert normalized_etag("") is None
    assert normalized_etag(None) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes 0-99/1000", (0, 100, 1000)),
        ("bytes 5-5/*", (5, 6, None)),
        ("bytes */1000", None),
        ("items 0-99/1000", None),
        ("bytes 0-99/1000 ", (0, 100, 1000)),
        ("bytes -5-99/1000", None),
    ],
)
def test_content_ranges(text: str, expected: tuple[int, int, int | None] | None) -> None:
    answer = Answer(httpx.Response(206, headers={"Content-Range": text.strip()}), None)
    assert answer.content_range == expected


@given(st.integers(1, 10**9), st.lists(st.integers(1, 2**20), min_size=1, max_size=50))
def test_a_rate_is_kept_over_any_longer_while(rate: int, sizes: list[int]) -> None:
    now = 1000.0
    limit = RateLimit(rate, clock=lambda: now)
    began = now
    for size in sizes:
        now += limit.delay_s(size)
    assert sum(sizes) / rate <= now - began + 0.25 + 1e-6
    assert now - began <= sum(sizes) / rate + 1e-6


def test_a_pause_earns_no_more_than_a_short_burst() -> None:
    now = 0.0
    limit = RateLimit(1000, clock=lambda: now)
    now = 3600.0
    assert limit.delay_s(1250) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least 1 byte"):
        RateLimit(0)


def mirrors(unusable: dict[str, StoreError] | None = None) -> Mirrors:
    file = RemoteFile("model.gguf", (FIRST, SECOND), 10, Digest("0" * 64))
    return Mirrors(file, POLICY, {} if unusable is None else unusable)


def test_a_dead_address_gives_way_and_the_last_one_gets_more_patience() -> None:
    unusable: dict[str, StoreError] = {}
    two = mirrors(unusable)
    two.failed(FIRST, "refused", began_s=1.0, now_s=2.0)
    two.failed(FIRST, "refused", began_s=1.5, now_s=2.1)  # broke at the same moment as the first
    assert (two.current, two.failures) == (FIRST, 1)
    two.failed(FIRST, "refused", began_s=3.0, now_s=4.0)
    assert two.current == SECOND
    assert mirrors(unusable).current == SECOND, "other files do not wait for it again"
    for at in (5.0, 7.0):
        two.failed(SECOND, "reset", began_s=at, now_s=at + 1)
        assert two.current == SECOND
    two.failed(SECOND, "reset", began_s=9.0, now_s=10.0)
    assert two.current is None
    error = two.error()
    assert isinstance(error, DownloadFailed)
    assert "one.example in 2 attempts (refused), and " in error.message
    assert error.message.endswith("two.example in 3 attempts (reset); pull again to resume.")


def test_bytes_renew_the_patience() -> None:
    two = mirrors()
    for at in (1.0, 3.0, 5.0):
        two.failed(FIRST, "reset", began_s=at, now_s=at + 1)
        two.progressed()
    assert two.current == FIRST


def test_a_refusal_is_about_one_file() -> None:
    unusable: dict[str, StoreError] = {}
    two = mirrors(unusable)
    two.refuse(FIRST, AccessDenied("one.example refuses; set HF_TOKEN."))
    assert (two.current, two.is_last) == (SECOND, True)
    assert mirrors(unusable).current == FIRST
    two.refuse(SECOND, AccessDenied("two.example refuses; set HF_TOKEN."))
    assert two.error().message == "one.example refuses, and two.example refuses; set HF_TOKEN."
    assert isinstance(two.error(), AccessDenied)


def test_progress_counts_the_whole_and_never_goes_back() -> None:
    seen: list[PullProgress] = []
    reporter = Reporter(seen.append, lambda: False)
    reporter.expect({"a": 100, "b": 50})
    reporter.count("downloading", "a", 60, 100)
    reporter.count("downloading", "b", 50, 50)
    reporter.count("verifying", "b", 10, 50)
    reporter.count("downloading", "a", 61, 100)  # too soon after the last one
    reporter.expect({"c": 850})
    reporter.count("downloading", "a", 100, 100)
    assert [(it.file, it.done_bytes, it.all_done_bytes, it.all_total_bytes) for it in seen] == [
        ("a", 60, 60, 150), ("b", 50, 110, 150), ("b", 10, 110, 150), ("a", 100, 150, 1000),
    ]  # fmt: skip
