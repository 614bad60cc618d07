"""The last step from pooled hidden states to what a request gets: cut, and brought to length 1, in float32.

Plain numpy on the host, whatever device computed the states.  Called by
`engine.runner.encoder_runner` and `engine.runner.prompt_pooling`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LEAST_LENGTH = 1e-12
"""What a vector's length is taken for at least, so that one of zeros stays one; sentence-transformers does so too."""


def finish_vectors(states: np.ndarray, dimensions: Sequence[int | None], *, normalize: bool) -> list[np.ndarray]:
    """float32 [N, H] and how many components each vector keeps -> N vectors.

    They get length 1 if `normalize`, and in any case where components were cut off.
    """
    if all(wanted is None for wanted in dimensions):
        return list(_normalized(states) if normalize else states)
    return [
        row if wanted is None and not normalize else _normalized(row[:wanted])
        for row, wanted in zip(states, dimensions, strict=True)
    ]


def _normalized(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    normalized: np.ndarray = vectors / np.maximum(lengths, np.float32(_LEAST_LENGTH))
    return normalized
