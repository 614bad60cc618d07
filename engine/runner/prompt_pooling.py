"""What becomes of prompts that a decoder does not continue: vectors of their last tokens, or how it would choose.

"embed" is the last token's hidden state after the final norm; "choice" is the probability of one token against
another as the next one, the softmax of two logits (Qwen3-Reranker: https://arxiv.org/abs/2506.05176).  In float32,
whatever the model computes in.  Called by `engine.runner.model_runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.api.errors import InvalidParameter
from engine.api.request import Pooling
from engine.api.wire import WorkerFacts
from engine.pooling.dimensions import check_dimensions
from engine.pooling.vectors import finish_vectors
from engine.runner.transfer import Download, upload


class PendingPooled:
    """Results on their way to the host.

    `states` [N, hidden_size] and `chances` [N] are of the prompts of `poolings`; each may be None where it is of no
    use to any of them.
    """

    def __init__(
        self,
        poolings: Sequence[Pooling],
        states: torch.Tensor | None,
        chances: torch.Tensor | None,
        *,
        normalizes: bool,
    ) -> None:
        self._poolings = poolings
        self._normalizes = normalizes
        self._states = None if states is None else Download(states)
        self._chances = None if chances is None else Download(chances)

    def wait(self) -> tuple[bytes, ...]:
        """As `SampledTokens.pooled`, in the order of `poolings`."""
        vectors = self._vectors()
        chances = [] if self._chances is None else self._chances.wait()[0].tolist()
        return tuple(
            vectors[index] if pooling.kind == "embed" else _bytes_of_finite(np.float32(chances[index]))
            for index, pooling in enumerate(self._poolings)
        )

    def _vectors(self) -> list[bytes]:
        if self._states is None:
            return []
        states = self._states.wait()[0].numpy()
        is_finite = np.isfinite(states).all(axis=1)
        dimensions = [pooling.dimensions for pooling in self._poolings]
        vectors = finish_vectors(
            np.where(is_finite[:, None], states, np.float32(0)), dimensions, normalize=self._normalizes
        )
        return [vector.tobytes() if whole else b"" for vector, whole in zip(vectors, is_finite, strict=True)]


def _bytes_of_finite(number: np.float32) -> bytes:
    return number.tobytes() if np.isfinite(number) else b""


def pool(
    poolings: Sequence[Pooling],
    hidden: torch.Tensor,
    final_states: Callable[[torch.Tensor], torch.Tensor],
    logits: torch.Tensor | None,
    *,
    normalizes: bool,
) -> PendingPooled:
    """Pool prompts whose last tokens' hidden states are `hidden` [N, hidden_size], before the final norm.

    `final_states` applies that; `logits` [N, vocab_size] are needed where any prompt is a choice.
    """
    states = final_states(hidden) if any(pooling.kind == "embed" for pooling in poolings) else None
    chances = None
    if any(pooling.kind == "choice" for pooling in poolings):
        assert logits is not None, "a choice is between logits"
        ids = np.array([pooling.choice_ids or (0, 0) for pooling in poolings], dtype=np.int64)
        pairs = logits.gather(1, upload(ids, logits.device)).float()
        chances = torch.sigmoid(pairs[:, 0] - pairs[:, 1])
    return PendingPooled(poolings, states, chances, normalizes=normalizes)


def check_pooling(pooling: Pooling | None, facts: WorkerFacts, hidden_size: int) -> None:
    """Raises `InvalidParameter` for what a decoder of `facts` and `hidden_size` cannot make of a prompt."""
    if facts.task == "embed" and (pooling is None or pooling.kind != "embed"):
        raise InvalidParameter(
            "model", "This model makes vectors, and nothing else; choose a chat model or a reranker."
        )
    if pooling is None:
        return
    if pooling.kind == "score":
        raise InvalidParameter("model", "This model has no classification head; choose a reranker.")
    if pooling.kind == "choice":
        if pooling.choice_ids is None or not all(0 <= token_id < facts.vocab_size for token_id in pooling.choice_ids):
            raise InvalidParameter(
                "choice_ids", f"A choice is between two of the model's {facts.vocab_size:,} tokens; give their ids."
            )
    else:
        check_dimensions(pooling.dimensions, hidden_size)
