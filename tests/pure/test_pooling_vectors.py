"""Pooled states become the vectors of a request: cut, and of length 1."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pooling.vectors import finish_vectors


def states(count: int = 3, width: int = 8) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, width)).astype(np.float32)


@given(st.lists(st.none() | st.integers(1, 8), min_size=1, max_size=5), st.booleans())
def test_each_vector_is_cut_and_normalised_by_itself(dimensions: list[int | None], normalize: bool) -> None:
    given_states = states(len(dimensions))
    for row, wanted, vector in zip(
        given_states, dimensions, finish_vectors(given_states, dimensions, normalize=normalize), strict=True
    ):
        assert vector.dtype == np.float32
        assert len(vector) == (wanted or 8)
        expected = row[:wanted] / np.linalg.norm(row[:wanted]) if normalize or wanted is not None else row
        np.testing.assert_allclose(vector, expected, rtol=1e-6)


@pytest.mark.parametrize("dimensions", [None, 4])
def test_a_vector_of_zeros_stays_one(dimensions: int | None) -> None:
    (vector,) = finish_vectors(np.zeros((1, 8), dtype=np.float32), [dimensions], normalize=True)
    assert not vector.any() and np.isfinite(vector).all()
