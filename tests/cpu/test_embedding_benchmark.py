"""What the benchmark of embeddings makes of its figures."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.embedders.answer import Answer, largest_distance
from benchmarks.embeddings import REFERENCE, Figures, mixed_texts, table


def answer(seconds: float, vector: tuple[float, float] = (1.0, 0.0), num_tokens: int = 100) -> Answer:
    return Answer.of([np.array(vector)], seconds, num_tokens)


def test_texts_are_of_all_lengths_and_the_same_each_time() -> None:
    texts = mixed_texts(200, seed=3)
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) >= 5 and max(lengths) <= 250 and max(lengths) - min(lengths) > 200
    assert texts == mixed_texts(200, seed=3)
    assert texts[0] != mixed_texts(1, seed=4)[0]


def test_an_answer_survives_the_pipe() -> None:
    sent = Answer.of(np.arange(6, dtype=np.float32).reshape(2, 3), 1.5, 7)
    found = Answer.from_json(sent.to_json())
    assert (found.vectors == sent.vectors).all()
    assert (found.seconds, found.num_tokens) == (1.5, 7)


def test_ratios_are_of_repeats() -> None:
    figures = Figures((REFERENCE, "quire"))
    for theirs, own in ((2.0, 1.0), (9.0, 3.0), (4.0, 1.0)):
        figures.add({REFERENCE: answer(theirs), "quire": answer(own)}, {REFERENCE: theirs, "quire": None})
    row = figures.summary("quire")
    assert (row["ratio"], row["ratio_range"], row["best_ratio"]) == (3.0, [2.0, 4.0], 2.0)
    assert row["cpu_ratio"] is None and row["token_counts_equal"]
    assert "3.00" in table({"quire": row})


def test_vectors_and_counts_that_differ_are_seen() -> None:
    figures = Figures((REFERENCE, "quire"))
    figures.add(
        {REFERENCE: answer(1.0), "quire": answer(1.0, (3.0, 4.0), 99)}, dict.fromkeys((REFERENCE, "quire"), 1.0)
    )
    row = figures.summary("quire")
    assert row["largest_distance"] == pytest.approx(0.4)
    assert not row["token_counts_equal"]
    assert largest_distance(np.array([[1.0, 0.0]]), np.array([[0.0, 2.0]])) == pytest.approx(1.0)
