"""all-MiniLM-L6-v2 against what sentence-transformers does, step by step with transformers' own classes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers

from engine import LLM
from engine.api.errors import ContextLengthExceeded, InvalidParameter
from store.models import InstalledModel

LONGEST = 256
WORDS = """paged engine keeps keys and values in blocks of sixteen tokens; lighthouse keeper climbed the stairs, storm
radio Straße naïve 数据库 поиск emoji 🙂 3.14159 it's O'Neill's e-mail@example.org #hashtag (parentheses)"""


@pytest.fixture(scope="module")
def llm(minilm: InstalledModel) -> Iterator[LLM]:
    threads = torch.get_num_threads()
    yield LLM(minilm.path, device="cpu")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """From nothing to 180 words of several scripts, and one beyond the longest."""
    generator = random.Random(7)
    words = WORDS.split()
    lengths = [0, 1, 2, 180, *(generator.randint(3, 80) for _ in range(16))]
    return [*(" ".join(generator.choices(words, k=length)) for length in lengths), "far too long a text " * 100]


@pytest.fixture(scope="module")
def expected(minilm: InstalledModel, texts: list[str]) -> np.ndarray:
    """Tokenise and cut, pad to a batch, mean of what is not padding, length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm.path)
    model = transformers.AutoModel.from_pretrained(minilm.path, dtype=torch.float32).eval()
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
    with torch.inference_mode():
        states = model(**encoded).last_hidden_state
    mask = encoded["attention_mask"].unsqueeze(-1)
    means = (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(means).numpy()


def test_vectors_agree(llm: LLM, texts: list[str], expected: np.ndarray) -> None:
    vectors = np.stack(llm.embed(texts, truncate=True))
    assert vectors.dtype == np.float32 and vectors.shape == (len(texts), 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    assert 1 - (vectors * expected).sum(axis=1).min() <= 1e-5
    facts = llm.facts
    assert (facts.task, facts.embedding_length, facts.max_model_len, facts.dtype) == ("embed", 384, LONGEST, "float32")


def test_company_does_not_matter(llm: LLM, texts: list[str]) -> None:
    together = np.stack(llm.embed(texts, truncate=True))
    alone = np.concatenate([llm.embed(text, truncate=True) for text in texts])
    np.testing.assert_allclose(alone, together, atol=1e-6)


def test_token_counts_are_equal(llm: LLM, minilm: InstalledModel, texts: list[str]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm.path)
    for text in texts:
        before = llm.stats().prompt_tokens_total
        llm.embed(text, truncate=True)
        counted = llm.stats().prompt_tokens_total - before
        assert counted == len(tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"])


def test_ids_and_text_give_the_same_vector(llm: LLM, minilm: InstalledModel) -> None:
    token_ids = transformers.AutoTokenizer.from_pretrained(minilm.path)("A ship answered.")["input_ids"]
    from_text, from_ids = llm.embed("A ship answered."), llm.embed(token_ids)
    assert len(from_text) == len(from_ids) == 1
    np.testing.assert_array_equal(from_text[0], from_ids[0])


def test_scores_are_cosines(llm: LLM) -> None:
    query, near, far = "Where do ships come in?", "The harbour is where ships arrive.", "Bake the bread for an hour."
    near_score, far_score = llm.score([(query, near), (query, far)])
    vectors = llm.embed([query, near])
    assert near_score == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-6)
    assert near_score > far_score + 0.3


def test_dimensions(llm: LLM) -> None:
    (whole,), (cut,) = llm.embed("lamp"), llm.embed("lamp", dimensions=64)
    np.testing.assert_allclose(cut, whole[:64] / np.linalg.norm(whole[:64]), atol=1e-6)


def test_what_cannot_be_done_is_one_sentence(llm: LLM, texts: list[str]) -> None:
    with pytest.raises(ContextLengthExceeded, match="256"):
        llm.embed(texts)
    with pytest.raises(InvalidParameter, match="vectors or scores"):
        llm.generate("Hello")
    with pytest.raises(InvalidParameter, match="dimensions"):
        llm.embed("a", dimensions=500)
    with pytest.raises(InvalidParameter, match="no prompt 'query'"):
        llm.embed("a", prompt_name="query")
