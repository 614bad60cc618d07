"""One state of many: the hidden states of each text become a vector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.pooling.config import PoolingMode
from engine.runner.transfer import upload


def pool_states(hidden: torch.Tensor, starts: Sequence[int], mode: PoolingMode) -> torch.Tensor:
    """Hidden states [T, H] of texts that begin at `starts`, whose last entry is T -> [N, H].

    "cls" and "last" give the first and the last token's state as it is, "mean" the mean of all in float32.
    """
    bounds = np.asarray(starts, dtype=np.int64)
    if mode == "mean":
        lengths = upload(np.diff(bounds), hidden.device)
        # Unsafe leaves out a check of the lengths, for which a GPU would be waited.
        return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, axis=0, unsafe=True)
    return hidden[upload(bounds[:-1] if mode == "cls" else bounds[1:] - 1, hidden.device)]
