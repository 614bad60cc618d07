"""The incremental detokenizer equals the one-shot decode, and never shows half a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizers import byte_level_backend, sentencepiece_backend

TOKENIZERS = {"byte-level": Tokenizer(byte_level_backend()), "sentencepiece": Tokenizer(sentencepiece_backend())}


def token_ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids at all, and ids of real text with its many-byte characters, cut anywhere."""
    anything = st.lists(st.integers(0, tokenizer.vocab_size + 3))
    real = st.text(st.sampled_from("aé€🙂 字\u0301hello"), min_size=1).map(tokenizer.encode)
    return st.lists(anything | real).map(lambda runs: [token_id for run in runs for token_id in run])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
def test_pieces_joined_equal_the_one_shot_decode(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(token_ids_of(tokenizer))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
def test_tokens_taken_together_give_the_same_text(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    runs = data.draw(st.lists(token_ids_of(tokenizer)))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push_all(run) for run in runs]
    token_ids = [token_id for run in runs for token_id in run]
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.sampled_from("aé€🙂 字ø\U0001f9d1\u200d"), min_size=1))
def test_whole_characters_only_and_none_of_them_late(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    detokenizer = Detokenizer(tokenizer)
    token_ids = tokenizer.encode(text)
    shown = ""
    for count, token_id in enumerate(token_ids, start=1):
        shown += detokenizer.push(token_id)
        complete = b"".join(map(tokenizer.token_bytes, token_ids[:count])).decode("utf-8", "ignore")
        assert shown == (complete.removeprefix(" ") if tokenizer.num_stripped_spaces else complete)
    assert detokenizer.flush() == ""
    assert shown == text


def test_a_character_that_never_becomes_whole_is_replaced_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("🙂")[0]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_continued_text_keeps_its_first_space() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    hello = tokenizer.encode("hello")[0]
    assert Detokenizer(tokenizer).push(hello) == "hello"
    assert Detokenizer(tokenizer, continues_text=True).push(hello) == " hello"


def test_tokens_without_text_do_not_count_as_the_beginning() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    beyond_the_vocabulary = tokenizer.vocab_size
    detokenizer = Detokenizer(tokenizer)
    token_ids = [beyond_the_vocabulary, *tokenizer.encode("hello")]
    assert [detokenizer.push(token_id) for token_id in token_ids] == ["", "hello"]


def test_a_hidden_token_does_not_break_the_character_around_it() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    first, second = tokenizer.encode("🙂")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token_id) for token_id in (first, 1, second)] == ["", "", "🙂"]


def test_the_work_per_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level_backend())
    read: list[int] = []
    token_bytes = tokenizer.token_bytes
    monkeypatch.setattr(tokenizer, "token_bytes", lambda token_id: read.append(token_id) or token_bytes(token_id))
    detokenizer = Detokenizer(tokenizer)
    token_ids = tokenizer.encode("hello wo 🙂" * 20)
    for token_id in token_ids:
        detokenizer.push(token_id)
    assert len(read) <= len(token_ids) + len(set(token_ids))  # once more to find out whether it is whole
