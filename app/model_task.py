"""What a model is for: to write, to make vectors, or to rank; in the words of people and of programs.

Reads only small files, never weights.  Used by the supervisor for the error of a model that is asked for something
else, and where models are listed and shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.errors import WrongTask
from engine.api.architectures import ENCODER_TYPES, HEADLESS_DECODERS
from engine.api.errors import EngineError
from engine.pooling.config import read_pooling

if TYPE_CHECKING:
    from engine.api.wire import Task
    from store.remote_model import RemoteModel

Capability = Literal["completion", "embedding", "rerank"]

CAPABILITIES: Mapping[Task, Capability] = {"generate": "completion", "embed": "embedding", "score": "rerank"}

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
_TELLING_NAMES = ("embed", "rerank")


def require_task(model: str, task: Task, wanted: tuple[Task, ...]) -> None:
    """Raise `WrongTask` if `model`, which does `task`, is asked for something else; none wanted means any."""
    if wanted and task not in wanted:
        raise WrongTask(f"{model} {_WHAT_IT_IS[task]}, or {_WHAT_ELSE[wanted[0]]}.", param="model")


def task_of(path: Path) -> Task:
    """What the model at `path` does, by its files.  Raises as `read_pooling` does."""
    pooling = read_pooling(path)
    return "generate" if pooling is None else pooling.task


def listed_capability(path: Path) -> Capability:
    """For listings, which must be fast: a GGUF file, tens of milliseconds to read, is looked into only if its name
    speaks of embedding or reranking."""
    if not path.is_dir() and not any(word in path.name.lower() for word in _TELLING_NAMES):
        return "completion"
    try:
        return CAPABILITIES[task_of(path)]
    except EngineError:
        # Whoever uses the model learns what is wrong with it.
        return "completion"


def remote_capability(remote: RemoteModel) -> Capability:
    """Of a model that is not here, by its config and the names of its files."""
    facts, files = remote.facts, {str(file.path) for file in remote.plan.files}
    if any(name.endswith("ForSequenceClassification") for name in facts.classes) or "1_LogitScore/config.json" in files:
        return "rerank"
    if facts.architecture not in ENCODER_TYPES and "rerank" in str(remote.plan.wanted.repo).lower():
        return "rerank"
    makes_vectors = facts.architecture in ENCODER_TYPES or not HEADLESS_DECODERS.isdisjoint(facts.classes)
    return "embedding" if makes_vectors or "modules.json" in files else "completion"
