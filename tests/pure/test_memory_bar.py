"""Bar pictures of memory: in proportion, within their width, explained."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.cli.memory_bar import MODEL_FILLS, Part, bar, picture
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
