"""`Answer`: what a contender made of some texts, and its way through a pipe."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Answer:
    """Vectors float32 [N, H] of N texts, the seconds they took, tokenising included, and the tokens that were read."""

    vectors: np.ndarray
    seconds: float
    num_tokens: int

    @classmethod
    def of(cls, vectors: Sequence[np.ndarray] | np.ndarray, seconds: float, num_tokens: int) -> Self:
        return cls(np.asarray(vectors, dtype=np.float32), seconds, num_tokens)

    def to_json(self) -> dict[str, Any]:
        return {
            "vectors": base64.b64encode(self.vectors.tobytes()).decode(),
            "columns": self.vectors.shape[1],
            "seconds": self.seconds,
            "num_tokens": self.num_tokens,
        }

    @classmethod
    def from_json(cls, answer: dict[str, Any]) -> Self:
        vectors = np.frombuffer(base64.b64decode(answer["vectors"]), dtype=np.float32)
        return cls(vectors.reshape(-1, answer["columns"]), answer["seconds"], answer["num_tokens"])


def largest_distance(left: np.ndarray, right: np.ndarray) -> float:
    """The largest cosine distance between vectors of the same text."""
    exact = [vectors.astype(np.float64) for vectors in (left, right)]
    lengths = [np.linalg.norm(vectors, axis=1) for vectors in exact]
    return float((1.0 - (exact[0] * exact[1]).sum(axis=1) / lengths[0] / lengths[1]).max())
