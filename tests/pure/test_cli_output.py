from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from datetime import UTC, datetime

import pytest

from app.cli.bars import BarView
from app.cli.output import format_age, format_duration, tolerate_any_streams, write_table, write_text
from app.cli.progress import LineView, PlainView, Tally
from app.schema.admin import ProgressLine
from store.space import format_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (98_362_432, "98 MB"),
        (999_499_999, "999 MB"),
        (999_600_000, "1.0 GB"),
        (4_100_000_000, "4.1 GB"),
        (2_300_000_000_000, "2.3 TB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("timestamp", "text"),
    [
        ("2026-03-10T12:00:00Z", "just now"),
        ("2026-03-10T11:59:59Z", "1 second ago"),
        ("2026-03-10T11:58:30Z", "1 minute ago"),
        ("2026-03-10T09:00:00Z", "3 hours ago"),
        ("2026-03-08T12:00:00Z", "2 days ago"),
        ("2026-01-01T12:00:00Z", "2 months ago"),
        ("2020-03-10T12:00:00Z", "6 years ago"),
        ("2026-03-11T12:00:00Z", "just now"),
    ],
)
def test_ages(timestamp: str, text: str) -> None:
    assert format_age(timestamp, now=datetime(2026, 3, 10, 12, 0, 0, tzinfo=UTC)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "less than a second"),
        (1.4, "1 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (100, "1 min 40 s"),
        (7260, "2 h 1 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_columns_line_up(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(("NAME", "SIZE"), [("a-long-name", "1 B"), ("b", "100 MB")])
    assert capsys.readouterr().out == "NAME         SIZE\na-long-name  1 B\nb            100 MB\n"


def test_control_characters_reach_a_pipe_but_not_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b]52;c;ZXZpbA==\x07b\r\x9b2J\tc\n"
    write_text(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_text(text)
    assert capsys.readouterr().out == "a]52;c;ZXZpbA==b2J\tc\n"


def test_the_line_of_a_terminal_is_gone_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    view = LineView()
    view.show(ProgressLine("loading weights", total=4, completed=1))
    view.close()
    assert capsys.readouterr().err == "\r\x1b[2Kloading weights: 25 %\r\x1b[2K"


def test_a_sentence_longer_than_the_terminal_is_shown_once_and_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    view = LineView()
    for status in ("waiting", "it needs more than is free", "it needs more than is free", "loading"):
        view.show(ProgressLine(status))
    assert capsys.readouterr().err == ("\r\x1b[2Kwaiting\r\x1b[2Kit needs more than is free\n\r\x1b[2Kloading")


def test_the_bar_takes_files_stages_and_markup(capsys: pytest.CaptureFixture[str]) -> None:
    view = BarView()
    view.show(ProgressLine("looking [for] it"))
    for completed in (0, 500, 1000):
        view.show(ProgressLine("downloading", "a[b].gguf", 1000, completed))
    view.close()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "looking [for] it" in printed.err
    assert "a[b].gguf" in printed.err
    assert "1.0/1.0 kB" in printed.err


def test_in_a_narrow_terminal_names_give_way_to_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    view = BarView()
    view.show(ProgressLine("downloading", "a-model-with-a-long-name.Q4_K_M.gguf", 98_400_000, 0))
    view.show(ProgressLine("downloading", "a-model-with-a-long-name.Q4_K_M.gguf", 98_400_000, 25_200_000))
    view.close()
    assert "25.2/98.4 MB" in capsys.readouterr().err


def test_only_a_terminal_cuts_the_last_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    write_table(("NAME", "GOOD FOR"), [("m", "long answers")], may_cut=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_table(("NAME", "GOOD FOR"), [("m", "long answers")], may_cut=True)
    write_table(("NAME",), [("a long name of one",)])
    assert capsys.readouterr().out.splitlines() == [
        "NAME  GOOD FOR", "m     long answers", "NAME  GOOD F", "m     long a", "NAME", "a long name of one",
    ]  # fmt: skip


def test_the_total_stands_below_the_files_and_small_ones_make_room(capsys: pytest.CaptureFixture[str]) -> None:
    view = BarView()
    view.show(ProgressLine("downloading", "config.json", 1000, 1000, 5_001_000, 1000))
    view.show(ProgressLine("downloading", "a.gguf", 5_000_000, 2_000_000, 5_001_000, 2_001_000))
    view.close()
    names = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
    assert names[-2:] == ["a.gguf", "total"]
    assert "config.json" not in names


def test_plain_lines_tell_each_tenth_of_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    view = PlainView(clock=lambda: now_s)
    view.show(ProgressLine("looking"))
    view.show(ProgressLine("verifying", "config.json", 100, 100, 10_000, 100))
    for completed in range(0, 9901, 100):
        now_s += 0.1
        file = "a.gguf" if completed % 200 else "b.gguf"
        view.show(ProgressLine("downloading", file, 5000, completed // 2, 10_000, 100 + completed))
    view.show(ProgressLine("verifying", "a.gguf", 5000, 5000, 10_000, 10_000))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["looking", "downloading: 1 kB of 10 kB (10 %), 900 B/s, 10 s left"]
    assert lines[-1] == "downloading: 10 kB of 10 kB (100 %)"
    assert len(lines) == 11


def two_models() -> list[ProgressLine]:
    """Two operations one after the other, the second smaller."""
    return [
        ProgressLine("downloading", "w.gguf", total, completed, total + 10, completed + 10)
        for total in (2000, 1000)
        for completed in (0, total // 2, total)
    ]


def test_each_of_several_models_is_a_whole_in_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(clock=lambda: 0.0)
    for line in two_models():
        view.show(line)
    assert capsys.readouterr().err.splitlines() == [
        "downloading: 1 kB of 2 kB (50 %)", "downloading: 2 kB of 2 kB (100 %)",
        "downloading: 510 B of 1 kB (50 %)", "downloading: 1 kB of 1 kB (100 %)",
    ]  # fmt: skip


def test_each_of_several_models_has_bars_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    view = BarView()
    for line in two_models()[:-1]:
        view.show(line)
    view.close()
    last = [line.split() for line in capsys.readouterr().err.splitlines()][-2:]
    assert [(words[0], words[2]) for words in last] == [("w.gguf", "0.5/1.0"), ("total", "0.5/1.0")]


async def test_a_tally_counts_what_came_while_it_looked_on() -> None:
    now_s = 0.0

    async def events() -> AsyncGenerator[ProgressLine, None]:
        nonlocal now_s
        yield ProgressLine("looking")
        for completed in (40_000_000, 50_000_000, 94_000_000):
            yield ProgressLine("downloading", "a", 94_000_000, completed, 94_000_000, completed)
            now_s += 6.0

    tally = Tally(clock=lambda: now_s)
    assert tally.summary() == ""
    assert len([line async for line in tally.of(events())]) == 4
    assert tally.summary() == " (54 MB in 12 s, 4 MB/s)"


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_is_an_empty_one(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    monkeypatch.setattr(sys, stream, None)
    tolerate_any_streams()
    with getattr(sys, stream) as opened:
        assert not opened.isatty()
        assert opened.read() == "" if stream == "stdin" else opened.write("nowhere")
