"""Texts to prompts that are pooled: what goes before them, how long they may be, what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tokenizers import processors

from engine.api.errors import ContextLengthExceeded, InvalidParameter, UnsupportedModel
from engine.api.request import EmbedRequest, Pooling, Prompt, ScoreRequest
from engine.pooling.config import ModelPooling
from engine.text import rerank_template
from engine.text.pooling_stage import PoolingStage
from engine.text.text_encoder import TextEncoder
from tests.fakes.tiny_embedder import CLS, MAX_LENGTH, PROMPTS, SEP, VOCABULARY, WIDTH, wordpiece_backend
from tests.fakes.tiny_tokenizers import byte_level_backend

ENCODER = TextEncoder(wordpiece_backend())
EMBEDDER = ModelPooling(task="embed", mode="mean", max_length=MAX_LENGTH, prompts=PROMPTS)
CROSS_ENCODER = ModelPooling(task="score", mode="cls", activation="sigmoid")
QWEN3_PROMPT = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"


def stage(pooling: ModelPooling = EMBEDDER, encoder: TextEncoder = ENCODER, max_model_len: int = 64) -> PoolingStage:
    return PoolingStage(
        encoder, pooling, max_model_len=max_model_len, vocab_size=len(VOCABULARY), embedding_length=WIDTH
    )


def embed(*inputs: str | tuple[int, ...], of: PoolingStage | None = None, **fields: Any) -> list[Prompt]:
    return (of or stage()).embed(EmbedRequest(inputs=inputs, **fields), itertools.count(10).__next__)


def score(*pairs: tuple[str, str], of: PoolingStage | None = None, **fields: Any) -> list[Prompt]:
    return (of or stage(CROSS_ENCODER)).score(ScoreRequest(pairs=pairs, **fields), itertools.count(10).__next__)


def ids(*words: str) -> tuple[int, ...]:
    return tuple(VOCABULARY[word] for word in words)


def byte_level_stage(pooling: ModelPooling, max_model_len: int = 1000) -> tuple[PoolingStage, TextEncoder]:
    backend = byte_level_backend()
    backend.add_tokens(["yes", "no"])
    encoder = TextEncoder(backend)
    made = PoolingStage(encoder, pooling, max_model_len=max_model_len, vocab_size=1000, embedding_length=WIDTH)
    return made, encoder


def test_each_text_becomes_a_prompt_in_order() -> None:
    first, second, third = embed("the cat", (7, 8), "dogs", dimensions=4)

    assert [prompt.sequence_id for prompt in (first, second, third)] == [10, 11, 12]
    assert first.token_ids == (CLS, *ids("the", "cat"), SEP)
    assert second.token_ids == (7, 8)
    assert third.token_ids == (CLS, *ids("dog", "##s"), SEP)
    assert first.pooling == second.pooling == third.pooling == Pooling("embed", dimensions=4)


@pytest.mark.parametrize(
    ("fields", "before"),
    [
        ({}, ()),
        ({"prompt_name": "query"}, ids("search", "for", ":")),
        ({"input_type": "query"}, ids("search", "for", ":")),
        ({"input_type": "document"}, ids("passage", ":")),
    ],
)
def test_prompts_go_before_texts(fields: dict[str, Any], before: tuple[int, ...]) -> None:
    (prompt,) = embed("cat", **fields)

    assert prompt.token_ids == (CLS, *before, *ids("cat"), SEP)


def test_the_default_prompt_is_for_texts_alone() -> None:
    with_default = stage(ModelPooling(task="embed", mode="mean", prompts=PROMPTS, default_prompt="passage"))

    text, token_ids = embed("cat", (5,), of=with_default)

    assert text.token_ids == (CLS, *ids("passage", ":", "cat"), SEP)
    assert token_ids.token_ids == (5,)
    assert embed("cat", of=with_default, prompt_name="query")[0].token_ids == (
        CLS,
        *ids("search", "for", ":", "cat"),
        SEP,
    )


def test_a_model_without_prompts_takes_both_sides_alike() -> None:
    (prompt,) = embed("cat", of=stage(ModelPooling(task="embed", mode="mean")), input_type="query")

    assert prompt.token_ids == (CLS, *ids("cat"), SEP)


def test_an_instruction_takes_the_place_of_the_models_own() -> None:
    qwen3, encoder = byte_level_stage(
        ModelPooling(task="embed", mode="last", prompts={"query": QWEN3_PROMPT, "document": ""})
    )

    (told,) = embed("hello", of=qwen3, instruction="Find the opposite")
    (query,) = embed("hello", of=qwen3, input_type="query")
    (document,) = embed("hello", of=qwen3, input_type="document")

    assert told.token_ids == encoder.encode(["Instruct: Find the opposite\nQuery:hello"])[0]
    assert query.token_ids == encoder.encode([QWEN3_PROMPT + "hello"])[0]
    assert document.token_ids == encoder.encode(["hello"])[0]


def test_lower_case_where_the_model_asks_for_it() -> None:
    lowercase, encoder = byte_level_stage(ModelPooling(task="embed", mode="mean", lowercase=True))

    assert embed("HELLO", of=lowercase)[0].token_ids == encoder.encode(["hello"])[0]


def test_lengths() -> None:
    """The model's own limit counts, and so does a context that is shorter at this moment."""
    fits = " ".join(["cat"] * (MAX_LENGTH - 2))

    assert len(embed(fits)[0].token_ids) == MAX_LENGTH
    with pytest.raises(ContextLengthExceeded, match=r"input\[1\] takes 17 tokens, and the model takes 16") as caught:
        embed("cat", fits + " cat")
    assert (caught.value.needed_tokens, caught.value.available_tokens) == (17, 16)
    short = stage(max_model_len=8)
    assert short.max_tokens == 8
    with pytest.raises(ContextLengthExceeded):
        embed(fits, of=short)
    short.max_model_len = 32
    assert short.max_tokens == MAX_LENGTH


def test_truncation() -> None:
    long = " ".join(["cat"] * 40)

    assert embed(long, truncate_tokens=-1)[0].token_ids == (CLS, *ids("cat") * (MAX_LENGTH - 2), SEP)
    assert embed(long, "cat", truncate_tokens=4)[0].token_ids == (CLS, *ids("cat", "cat"), SEP)
    assert embed((5,) * 40, truncate_tokens=4)[0].token_ids == (5, 5, 5, 5)
    for impossible in (0, 2, MAX_LENGTH + 1, -2):
        with pytest.raises(InvalidParameter, match=r"give -1 .*, or 3 to 16"):
            embed(long, truncate_tokens=impossible)


@pytest.mark.parametrize(
    ("inputs", "fields", "param", "says"),
    [
        ((), {}, "input", "send at least one text"),
        (((),), {}, "input", r"input\[0\] is empty"),
        (((-1,),), {}, "input", "the token id -1"),
        (((5, len(VOCABULARY)),), {}, "input", f"the token id {len(VOCABULARY)}"),
        (("\ud800",), {}, "input", "unpaired surrogate"),
        (("cat",), {"dimensions": WIDTH + 1}, "dimensions", "have 8"),
        (("cat",), {"dimensions": 0}, "dimensions", "have 8"),
        (("cat",), {"prompt_name": "song"}, "prompt_name", "it has query, passage"),
        (("cat",), {"instruction": "sing"}, "instruction", "not trained to be told"),
        (("cat",), {"prompt_name": "query", "instruction": "sing"}, "prompt_name", "exclude each other"),
        (((5,),), {"prompt_name": "query"}, "prompt_name", "not before token ids"),
    ],
)
def test_what_is_refused(inputs: tuple[Any, ...], fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidParameter, match=says) as caught:
        embed(*inputs, **fields)

    assert caught.value.param == param


def test_pairs_of_a_cross_encoder() -> None:
    (prompt,) = score(("the cat", "dog"))

    assert prompt.token_ids == (CLS, *ids("the", "cat"), SEP, *ids("dog"), SEP)
    assert prompt.pooling == Pooling("score", second_start=4)


def test_pairs_that_are_too_long() -> None:
    pair = ("the cat", "dog " * 100)

    with pytest.raises(ContextLengthExceeded, match=r"documents\[1\] takes 105 tokens, and the model takes 64"):
        score(("cat", "dog"), pair)
    assert score(pair, truncate_tokens=-1)[0].token_ids == (CLS, *ids("the", "cat"), SEP, *ids("dog") * 59, SEP)
    assert score(pair, truncate_tokens=8)[0].token_ids == (CLS, *ids("the", "cat"), SEP, *ids("dog") * 3, SEP)
    assert score(pair, max_document_tokens=2)[0].token_ids == (CLS, *ids("the", "cat"), SEP, *ids("dog", "dog"), SEP)
    with pytest.raises(InvalidParameter, match="instruction"):
        score(("cat", "dog"), instruction="sing")
    with pytest.raises(InvalidParameter, match="send at least one text"):
        score()


def test_a_decoder_is_asked_to_answer_yes_or_no() -> None:
    reranker, encoder = byte_level_stage(ModelPooling(task="score", mode="last", choices=("yes", "no")))

    (prompt,) = score(("who", "me"), of=reranker)
    (told,) = score(("who", "me"), of=reranker, instruction="Guess")

    def plain(text: str) -> tuple[int, ...]:
        return encoder.encode([text], add_special_tokens=False)[0]

    before, after = plain(rerank_template.BEFORE), plain(rerank_template.AFTER)
    default = rerank_template.DEFAULT_INSTRUCTION
    assert prompt.token_ids == (*before, *plain(f"<Instruct>: {default}\n<Query>: who\n<Document>: me"), *after)
    assert told.token_ids == (*before, *plain("<Instruct>: Guess\n<Query>: who\n<Document>: me"), *after)
    yes, no = encoder.token_id("yes"), encoder.token_id("no")
    assert prompt.pooling == Pooling("choice", choice_ids=(yes, no))  # type: ignore[arg-type]


def test_a_question_that_is_cut_keeps_its_end_of_the_template() -> None:
    reranker, encoder = byte_level_stage(ModelPooling(task="score", mode="last", choices=(300, 301)))
    before, after = encoder.encode((rerank_template.BEFORE, rerank_template.AFTER), add_special_tokens=False)
    most = len(before) + len(after) + 150

    (prompt,) = score(("who", "me " * 1000), of=reranker, truncate_tokens=most)

    assert len(prompt.token_ids) == most
    assert prompt.token_ids[-len(after) :] == after
    assert prompt.pooling == Pooling("choice", choice_ids=(300, 301))
    with pytest.raises(ContextLengthExceeded):
        score(("who", "me " * 1000), of=reranker)


def test_the_template_is_not_ended_by_the_tokenizer() -> None:
    """A tokenizer that ends texts with a token must not do so in the middle of the template."""
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    pooling = ModelPooling(task="score", mode="last", choices=(5, 6))
    reranker = PoolingStage(TextEncoder(backend), pooling, max_model_len=1000, vocab_size=1000, embedding_length=WIDTH)

    assert 0 not in score(("who", "me"), of=reranker)[0].token_ids


def test_a_reranker_without_its_answers_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="yes or no"):
        stage(ModelPooling(task="score", mode="last", choices=("yes", "no")))


def test_an_embedder_compares_queries_with_documents() -> None:
    request = ScoreRequest(pairs=(("cat", "the dog ran"),), max_document_tokens=2, param="text_2")

    queries, documents = stage().compare(request, ["cat"], ["the dog ran"])

    assert (queries.inputs, queries.input_type) == (("cat",), "query")
    assert (documents.inputs, documents.input_type, documents.param) == (("the dog ",), "document", "text_2")
