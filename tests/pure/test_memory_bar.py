"""Bar pictures of memory: in proportion, within their width, explained."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.cli.memory_bar import MODEL_FILLS, Part, bar, picture, staircase
from app.cli.output import display_width

GB = 10**9


def parts_of(sizes: list[int]) -> list[Part]:
    return [Part(MODEL_FILLS[index % len(MODEL_FILLS)], f"m{index}", size) for index, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=6), st.integers(6, 120))
def test_a_bar_fills_its_width_in_proportion(sizes: list[int], num_columns: int) -> None:
    drawn = bar(parts_of(sizes), num_columns)

    assert len(drawn) == (num_columns if sum(sizes) else 0)
    spare = num_columns - sum(size > 0 for size in sizes)
    for index, size in enumerate(sizes):
        width = drawn.count(MODEL_FILLS[index])
        assert width >= 1 if size else width == 0
        if size:
            assert abs(width - 1 - spare * size / sum(sizes)) < 1


def test_larger_parts_are_never_narrower() -> None:
    assert bar(parts_of([30, 20, 50]), 13) == "####===++++++"


def test_a_part_too_small_for_a_column_has_one() -> None:
    assert bar(parts_of([1, 10**12]), 10) == "#" + "=" * 9


def test_the_picture_says_what_each_character_stands_for() -> None:
    parts = [Part("#", "qwen3:4b", 9 * GB), Part(".", "free", 3 * GB), Part("-", "kept", GB)]

    first, legend = picture("cuda:0", parts, 60)

    assert first == "cuda:0  [###########################..........----]  13.0 GB"
    assert len(first) == 60
    assert legend == "        # qwen3:4b 9.0 GB   . free 3.0 GB   - kept 1.0 GB"


def test_the_legend_breaks_between_parts_and_wide_names_count_twice() -> None:
    parts = [Part("#", "模型" * 8, GB), Part("=", "b", GB), Part("+", "c", GB)]

    lines = picture("RAM", parts, 50)

    assert lines[1:] == [f"     # {'模型' * 8} 1.0 GB", "     = b 1.0 GB   + c 1.0 GB"]
    assert all(display_width(line) <= 50 for line in lines)


LABELS = ("weights", "workspace", "KV cache")


def test_bars_of_several_models_begin_where_the_one_before_ended() -> None:
    bars = [("first", (20, 10, 30)), ("second", (10, 0, 1))]

    assert staircase(bars, LABELS, free_bytes=19, kept_bytes=10, num_columns=40) == [
        "first   [######===++++++++..........---]",
        "second  [.................###+......---]",
        "         # weights   = workspace",
        "         + KV cache   . free",
        "         - above memory_limit",
    ]


sizes = st.tuples(*[st.integers(0, 10**9)] * 3)
any_bars = st.lists(st.tuples(st.text("ab模", max_size=40), sizes), min_size=1, max_size=4)


@given(any_bars, st.integers(0, 10**10), st.integers(0, 10**10), st.integers(40, 120))
def test_such_bars_fill_the_terminal_and_show_every_part(
    bars: list[tuple[str, tuple[int, int, int]]], free_bytes: int, kept_bytes: int, num_columns: int
) -> None:
    lines = staircase(bars, LABELS, free_bytes=free_bytes, kept_bytes=kept_bytes, num_columns=num_columns)

    has_any = free_bytes + kept_bytes + sum(sum(parts) for _, parts in bars) > 0
    for line, (_, parts) in zip(lines, bars, strict=False):
        assert not has_any or display_width(line) == num_columns
        drawn = line[line.index("[") :]
        assert [fill in drawn for fill in "#=+"] == [size > 0 for size in parts]
