"""Medians, ratios and the table of a comparison, from the figures of each repeat.  Pure arithmetic and text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LOWER_IS_BETTER = frozenset({"s", "MiB"})


@dataclass(frozen=True, slots=True)
class Goal:
    """What a ratio Quire / llama.cpp must reach, and what it aims at."""

    must: float
    aim: float


GOALS = {
    "prompt_512": Goal(3.0, 5.0),
    "generate_1": Goal(1.0, 1.3),
    "generate_16": Goal(3.0, 5.0),
    "load": Goal(1.5, 1.0),
    "peak memory beyond KV": Goal(2.0, 1.5),
}
"""Stated for SmolLM2-135M-Instruct Q4_1 on two threads; of what another model reaches they are a measure too."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measure: each repeat's figure of both contenders, in the same order; `unit` tells which way is better."""

    name: str
    unit: str
    quire: tuple[float, ...]
    llamacpp: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of Quire's figures over median of llama.cpp's."""
        return statistics.median(self.quire) / statistics.median(self.llamacpp)

    @property
    def best_ratio(self) -> float:
        """Quire's best figure over llama.cpp's: what is left when the least disturbed repeat of each counts."""
        best = min if self.unit in LOWER_IS_BETTER else max
        return best(self.quire) / best(self.llamacpp)

    @property
    def paired_ratios(self) -> list[float]:
        """Each repeat's own ratio: neighbours in time, so what disturbs the machine disturbs both."""
        return [quire / llamacpp for quire, llamacpp in zip(self.quire, self.llamacpp, strict=True)]

    @property
    def verdict(self) -> str:
        """Whether the goal is reached: "aim", "must", "short" of both, or "" where there is none."""
        goal = GOALS.get(self.name)
        if goal is None:
            return ""
        if self._reaches(goal.aim):
            return "aim"
        return "must" if self._reaches(goal.must) else "short"

    def _reaches(self, goal: float) -> bool:
        return self.ratio <= goal if self.unit in LOWER_IS_BETTER else self.ratio >= goal

    def as_json(self) -> dict[str, Any]:
        goal = GOALS.get(self.name)
        return {
            "unit": self.unit,
            "quire": rounded(self.quire),
            "llamacpp": rounded(self.llamacpp),
            "quire_median": _rounded(statistics.median(self.quire)),
            "llamacpp_median": _rounded(statistics.median(self.llamacpp)),
            "ratio": _rounded(self.ratio),
            "best_ratio": _rounded(self.best_ratio),
            "paired_ratios": rounded(self.paired_ratios),
            "must": goal.must if goal else None,
            "aim": goal.aim if goal else None,
            "verdict": self.verdict or None,
        }


def spread_percent(figures: Sequence[float]) -> float:
    """Largest minus smallest, in percent of the median."""
    return 100 * (max(figures) - min(figures)) / statistics.median(figures)


def table(rows: Sequence[Row]) -> str:
    """The comparison as text; `ratio` is of medians, `range` that of single repeats, `best` of best figures."""
    lines = [
        f"{'':24}{'':6}{'Quire':>10}{'±%':>5}{'llama.cpp':>11}{'±%':>5}{'ratio':>8}{'range':>14}{'best':>8}"
        f"{'must':>8}{'aim':>8}  reached"
    ]
    for row in rows:
        paired = row.paired_ratios
        line = (
            f"{row.name:24}{row.unit:6}{statistics.median(row.quire):>10,.4g}{spread_percent(row.quire) / 2:>5.0f}"
            f"{statistics.median(row.llamacpp):>11,.4g}{spread_percent(row.llamacpp) / 2:>5.0f}{row.ratio:>8.2f}"
            f"{f'{min(paired):.2f}-{max(paired):.2f}':>14}{row.best_ratio:>8.2f}"
        )
        goal = GOALS.get(row.name)
        if goal is not None:
            sign = "≤" if row.unit in LOWER_IS_BETTER else "≥"
            line += f"{f'{sign} {goal.must:g}':>8}{f'{sign} {goal.aim:g}':>8}  {row.verdict}"
        lines.append(line)
    return "\n".join(lines)


def rounded(figures: Sequence[float]) -> list[float]:
    return [_rounded(figure) for figure in figures]


def _rounded(figure: float) -> float:
    """Four significant digits."""
    return float(f"{figure:.4g}")
