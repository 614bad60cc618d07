"""What a model is for, in words: the error for one that is asked for something else.

Used by `app.generation` and `app.pooling`.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.errors import WrongTask
from engine.api.wire import Task

_WHAT_IT_IS: Mapping[Task, str] = {
    "generate": "is a model that writes text; send it to /v1/chat/completions",
    "embed": "is an embedding model; send its texts to /v1/embeddings",
    "score": "is a reranker; send its queries and documents to /v1/rerank",
}
_WHAT_ELSE: Mapping[Task, str] = {
    "generate": "choose a chat model to have text written",
    "embed": "choose an embedding model, such as qwen3-embedding:0.6b",
    "score": "choose a reranker, such as qwen3-reranker:0.6b",
}


def wrong_task(model: str, task: Task, wanted: Task) -> WrongTask:
    """For `model`, which does `task`, when it is asked for `wanted`."""
    return WrongTask(f"{model} {_WHAT_IT_IS[task]}, or {_WHAT_ELSE[wanted]}.", param="model")
