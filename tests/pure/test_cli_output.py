from __future__ import annotations

import sys
from datetime import UTC, datetime

import pytest

from app.cli.output import format_age, format_bytes, write_table, write_text
from app.cli.progress import BarView, LineView
from app.schema.admin import ProgressLine


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
