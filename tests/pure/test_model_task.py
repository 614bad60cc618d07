"""What models are for, told by their small files or, of those that are not here, by their config and file names."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.errors import WrongTask
from app.model_task import Capability, listed_capability, remote_capability, require_task, task_of
from engine.api.wire import Task
from store.remote_model import RemoteModel
from tests.fakes.tiny_embedder import write_tiny_cross_encoder, write_tiny_embedder
from tests.fakes.tiny_model import write_tiny_model
from tests.fakes.tiny_tokenizers import byte_level_metadata, write_gguf


def test_by_small_files(tmp_path: Path) -> None:
    assert task_of(write_tiny_embedder(tmp_path / "a")) == "embed"
    assert task_of(write_tiny_cross_encoder(tmp_path / "b")) == "score"
    assert task_of(write_tiny_model(tmp_path / "c")) == "generate"
    assert [listed_capability(tmp_path / name) for name in "abc"] == ["embedding", "rerank", "completion"]


def test_listings_open_few_gguf_files(tmp_path: Path) -> None:
    """A name that speaks of vectors is looked into; what another one holds is not read, be it broken."""
    metadata = {**byte_level_metadata(), "qwen3.pooling_type": 3}
    write_gguf(tmp_path / "Qwen3-Embedding-Q8_0.gguf", metadata, architecture="qwen3")
    (tmp_path / "chat.gguf").write_bytes(b"no model")

    assert listed_capability(tmp_path / "Qwen3-Embedding-Q8_0.gguf") == "embedding"
    assert listed_capability(tmp_path / "chat.gguf") == "completion"


def test_a_way_to_pool_that_is_not_supported_does_not_end_a_listing(tmp_path: Path) -> None:
    model = write_tiny_embedder(tmp_path)
    (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))

    assert listed_capability(model) == "completion"


@pytest.mark.parametrize(
    ("architecture", "classes", "repo", "files", "capability"),
    [
        ("qwen3", ["Qwen3ForCausalLM"], "Qwen/Qwen3-4B", (), "completion"),
        ("qwen3", ["Qwen3ForCausalLM"], "Qwen/Qwen3-Embedding-4B", ("modules.json",), "embedding"),
        ("qwen3", ["Qwen3Model"], "org/some", (), "embedding"),
        ("qwen3", ["Qwen3ForCausalLM"], "Qwen/Qwen3-Reranker-4B", (), "rerank"),
        ("qwen3", ["Qwen3ForCausalLM"], "org/judge", ("modules.json", "1_LogitScore/config.json"), "rerank"),
        ("bert", ["BertModel"], "BAAI/bge-small-en-v1.5", ("modules.json",), "embedding"),
        ("xlm-roberta", ["XLMRobertaForSequenceClassification"], "BAAI/bge-reranker-base", (), "rerank"),
    ],
)
def test_of_models_that_are_not_here(
    architecture: str, classes: list[str], repo: str, files: tuple[str, ...], capability: Capability
) -> None:
    plan = SimpleNamespace(wanted=SimpleNamespace(repo=repo), files=[SimpleNamespace(path=file) for file in files])
    remote: Any = SimpleNamespace(facts=SimpleNamespace(architecture=architecture, classes=classes), plan=plan)

    assert remote_capability(cast(RemoteModel, remote)) == capability


@pytest.mark.parametrize(
    ("task", "wanted", "says"),
    [
        ("embed", ("generate",), "m is an embedding model; send its texts to /v1/embeddings, or choose a chat model"),
        (
            "generate",
            ("embed",),
            "m is a model that writes text; send it to /v1/chat/completions, or choose an embedding",
        ),
        ("score", ("embed",), "m is a reranker; send its queries and documents to /v1/rerank, or choose an"),
        ("generate", ("score", "embed"), "or choose a reranker"),
    ],
)
def test_a_model_that_is_asked_for_something_else(task: Task, wanted: tuple[Task, ...], says: str) -> None:
    with pytest.raises(WrongTask) as caught:
        require_task("m", task, wanted)

    assert says in caught.value.message
    assert caught.value.param == "model"


def test_what_is_wanted_passes() -> None:
    require_task("m", "embed", ("score", "embed"))
    require_task("m", "generate", ())
