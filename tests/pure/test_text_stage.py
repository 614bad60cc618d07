"""Requests to prompts, and step outputs back to text."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.errors import ContextLengthExceeded, InvalidParameter
from engine.api.output import OutputDelta, StepOutput, TokenLogprobs, Usage
from engine.api.request import GenerateRequest, Prompt
from engine.api.sampling import SamplingParams
from engine.text.chat_template import ChatTemplate
from engine.text.stage import SequenceText, TextStage, open_text_files
from engine.text.tokenizer import Tokenizer, gguf_tokenizer
from tests.fakes.tiny_tokenizers import (
    CHATML,
    byte_level_backend,
    byte_level_metadata,
    sentencepiece_metadata,
    write_directory,
    write_gguf,
)

IM_START, IM_END = 1, 2
TOKENIZER = Tokenizer(byte_level_backend(), bos_token_id=0, eos_token_id=IM_END, eos_token_ids=(IM_END,))
VOCAB_SIZE = TOKENIZER.vocab_size
STAGE = TextStage(TOKENIZER, ChatTemplate(CHATML), max_model_len=64, vocab_size=VOCAB_SIZE)
HELLO = ({"role": "user", "content": "hello"},)


def request(sampling: SamplingParams | None = None, **fields: Any) -> GenerateRequest:
    fields = fields or {"token_ids": (5, 6, 7)}
    return GenerateRequest(request_id="r", sampling=sampling or SamplingParams(), **fields)


def prepare(sampling: SamplingParams | None = None, stage: TextStage = STAGE, **fields: Any) -> list[Prompt]:
    return stage.prepare(request(sampling, **fields), itertools.count(10).__next__)


def choice(sampling: SamplingParams | None = None, stage: TextStage = STAGE, **fields: Any) -> SequenceText:
    made = request(sampling, **fields)
    return stage.stream(made, stage.prepare(made, lambda: 1)[0], 3)


def push_all(text: SequenceText, token_ids: list[int], **last: Any) -> list[OutputDelta]:
    """One step per token; `last` are fields of the last one."""
    steps = [StepOutput(1, (token_id,)) for token_id in token_ids]
    steps[-1] = StepOutput(1, (token_ids[-1],), **last)
    return [text.push(step) for step in steps]


def shown(deltas: list[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_a_text_becomes_one_prompt() -> None:
    assert prepare(text="hello wo", cache_salt="s") == [
        Prompt(
            sequence_id=10,
            token_ids=tuple(TOKENIZER.encode("hello wo")),
            max_tokens=62,
            sampling=SamplingParams(),
            stop_token_ids=(IM_END,),
            cache_salt="s",
        )
    ]


def test_messages_are_rendered_and_tokenized_with_their_special_tokens() -> None:
    (prompt,) = prepare(messages=HELLO)
    assert TOKENIZER.decode(prompt.token_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.token_ids[0] == IM_START


def test_a_chat_prompt_gets_its_bos_once_and_a_text_prompt_as_asked() -> None:
    tokenizer = gguf_tokenizer(sentencepiece_metadata())
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", bos_token=tokenizer.bos_token)
    stage = TextStage(tokenizer, template, max_model_len=64, vocab_size=tokenizer.vocab_size)
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert prepare(stage=stage, messages=HELLO)[0].token_ids == (1, *hello)
    assert prepare(stage=stage, text="hello")[0].token_ids == (1, *hello)
    assert prepare(stage=stage, text="hello", add_special_tokens=False)[0].token_ids == tuple(hello)


def test_template_variables_reach_the_template() -> None:
    stage = TextStage(TOKENIZER, ChatTemplate("{{ mood }}{{ add_generation_prompt }}"), 64, VOCAB_SIZE)
    (prompt,) = prepare(stage=stage, messages=HELLO, chat_template_kwargs={"mood": "x", "add_generation_prompt": 0})
    assert TOKENIZER.decode(prompt.token_ids) == "x0"


def test_every_sample_gets_its_own_id_and_seed() -> None:
    prompts = prepare(SamplingParams(n=3, seed=2**63 - 2))
    assert [prompt.sequence_id for prompt in prompts] == [10, 11, 12]
    assert [prompt.sampling.seed for prompt in prompts] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [prompt.sampling.seed for prompt in prepare(SamplingParams(n=2))] == [None, None]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), (IM_END,)),
        (SamplingParams(stop_token_ids=(9, IM_END, 8)), (IM_END, 9, 8)),
        (SamplingParams(ignore_eos=True), ()),
        (SamplingParams(ignore_eos=True, stop_token_ids=(9,)), (9,)),
    ],
)
def test_stop_tokens_are_those_of_model_and_request(sampling: SamplingParams, expected: tuple[int, ...]) -> None:
    assert prepare(sampling)[0].stop_token_ids == expected


def test_an_eos_id_that_the_model_does_not_have_is_left_out() -> None:
    stage = TextStage(TOKENIZER, None, max_model_len=64, vocab_size=2)
    assert prepare(stage=stage, token_ids=(0, 1))[0].stop_token_ids == ()


@pytest.mark.parametrize(("asked", "expected"), [(None, 61), (7, 7), (61, 61), (62, 61), (2**31 - 1, 61)])
def test_max_tokens_is_cut_to_the_room_behind_the_prompt(asked: int | None, expected: int) -> None:
    assert prepare(SamplingParams(max_tokens=asked))[0].max_tokens == expected


def test_a_prompt_that_fills_the_context_but_for_one_token_is_served() -> None:
    assert prepare(token_ids=(5,) * 63)[0].max_tokens == 1


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_a_prompt_that_leaves_no_room_tells_both_counts(length: int) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        prepare(token_ids=(5,) * length, prompt_param="prompt")
    assert (caught.value.needed_tokens, caught.value.available_tokens) == (length + 1, 64)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(temperature=float("nan")), "temperature"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(stop=("a", "")), "stop"),
        (SamplingParams(min_tokens=62), "min_tokens"),
        (SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=(5, VOCAB_SIZE)), "stop_token_ids"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids"),
    ],
)
def test_sampling_that_cannot_be_served_is_named(sampling: SamplingParams, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        prepare(sampling)
    assert caught.value.param == param


def test_sampling_at_the_edge_of_what_can_be_served_is_taken() -> None:
    sampling = SamplingParams(
        min_tokens=61, logit_bias={0: 1.0, VOCAB_SIZE - 1: -1.0}, stop_token_ids=(VOCAB_SIZE - 1,)
    )
    assert prepare(sampling)[0].sampling == sampling


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text": ""}, "empty"),
        ({"token_ids": ()}, "empty"),
        ({"messages": ()}, "empty"),
        ({"text": "a", "token_ids": (1,)}, "exactly one"),
        ({"prompt_param": "input"}, "exactly one"),
        ({"token_ids": (1, VOCAB_SIZE)}, f"id {VOCAB_SIZE}"),
        ({"token_ids": (1, -3)}, "id -3"),
        ({"text": "a\ud800b"}, "surrogate at character 1"),
        ({"messages": ({"role": "user", "content": "\udfff"},)}, "surrogate"),
    ],
)
def test_a_prompt_that_cannot_be_served_names_its_field(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason) as caught:
        prepare(**{"prompt_param": "input", **fields})
    assert caught.value.param == "input"


def test_messages_need_a_chat_template() -> None:
    stage = TextStage(TOKENIZER, None, max_model_len=64, vocab_size=VOCAB_SIZE)
    with pytest.raises(InvalidParameter, match="no chat template; send a plain prompt") as caught:
        prepare(stage=stage, messages=HELLO)
    assert caught.value.param == "messages"


def test_open_reads_tokenizer_and_template_from_directory_or_file(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level_backend(), tokenizer_config={"chat_template": CHATML})
    metadata = {**byte_level_metadata(), "tokenizer.chat_template": CHATML}
    for model in (tmp_path, write_gguf(tmp_path / "tiny.gguf", metadata)):
        stage = TextStage(*open_text_files(model), max_model_len=64, vocab_size=VOCAB_SIZE)
        assert prepare(stage=stage, messages=HELLO)[0].token_ids == prepare(messages=HELLO)[0].token_ids


def test_text_grows_token_by_token_and_ends_with_usage() -> None:
    text = choice()
    token_ids = TOKENIZER.encode("hello wo🙂")
    deltas = push_all(text, token_ids, finish_reason="length")
    assert [delta.text for delta in deltas] == ["hello", " wo", "", "🙂"]
    assert [delta.token_ids for delta in deltas] == [(token_id,) for token_id in token_ids]
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "length"]
    assert [delta.usage for delta in deltas] == [None, None, None, Usage(prompt_tokens=3, completion_tokens=4)]
    assert {delta.index for delta in deltas} == {3}


def test_cached_prompt_tokens_are_reported() -> None:
    text = choice()
    text.push(StepOutput(1, (5,), num_cached_tokens=2))
    delta = text.push(StepOutput(1, (5,), finish_reason="length"))
    assert delta.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=2)


def test_cached_tokens_beyond_the_prompt_are_not_the_prompts() -> None:
    # A sequence resumed after a preemption finds its own answer in the cache too.
    delta = choice().push(StepOutput(1, (5,), num_cached_tokens=16, finish_reason="length"))
    assert delta.usage == Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=3)


@pytest.mark.parametrize(
    ("sampling", "token_id", "text", "stop_reason"),
    [
        (SamplingParams(), IM_END, "hello", None),
        (SamplingParams(skip_special_tokens=False), IM_END, "hello<|im_end|>", None),
        (SamplingParams(include_stop_str_in_output=True), IM_END, "hello", None),
        (SamplingParams(stop_token_ids=(IM_END,)), IM_END, "hello", None),
        (SamplingParams(stop_token_ids=(IM_END,), ignore_eos=True), IM_END, "hello", IM_END),
        (SamplingParams(stop_token_ids=(40,)), 40, "hello", 40),
        (SamplingParams(stop_token_ids=(40,), include_stop_str_in_output=True), 40, "hello%", 40),
    ],
)
def test_a_stop_token_is_counted_but_not_shown(
    sampling: SamplingParams, token_id: int, text: str, stop_reason: int | None
) -> None:
    token_ids = [*TOKENIZER.encode("hello"), token_id]
    deltas = push_all(choice(sampling), token_ids, finish_reason="stop", stop_token_id=token_id)
    assert shown(deltas) == text
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop_reason)
    assert deltas[-1].token_ids == (token_id,)
    assert deltas[-1].usage == Usage(prompt_tokens=3, completion_tokens=2)


def test_a_special_token_inside_the_answer_is_hidden_or_shown() -> None:
    token_ids = [*TOKENIZER.encode("hello"), IM_START, *TOKENIZER.encode("hello")]
    assert shown(push_all(choice(), token_ids, finish_reason="length")) == "hellohello"
    visible = choice(SamplingParams(skip_special_tokens=False))
    assert shown(push_all(visible, token_ids, finish_reason="length")) == "hello<|im_start|>hello"


def test_a_stop_string_ends_the_choice_before_the_worker_knows() -> None:
    text = choice(SamplingParams(stop=("lo w",)))
    token_ids = TOKENIZER.encode("a") + TOKENIZER.encode("hello wo") + TOKENIZER.encode("x")
    deltas = [text.push(StepOutput(1, (token_id,))) for token_id in token_ids[:3]]
    assert [delta.text for delta in deltas] == ["a", "hel", ""]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "lo w")
    assert deltas[-1].usage == Usage(prompt_tokens=3, completion_tokens=3)
    assert text.finished
    assert text.push(StepOutput(1, (token_ids[3],), finish_reason="abort")) == OutputDelta(index=3)


def test_tokens_behind_the_stop_string_in_one_step_are_dropped() -> None:
    text = choice(SamplingParams(stop=("b",), logprobs=0))
    a, b, c = TOKENIZER.encode("abc")
    logprobs = tuple(TokenLogprobs(-float(n)) for n in range(3))
    delta = text.push(StepOutput(1, (a, b, c), finish_reason="length", logprobs=logprobs))
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason) == ("a", (a, b), "stop", "b")
    assert [entry.token for entry in delta.logprobs] == ["a", "b"]
    assert delta.usage == Usage(prompt_tokens=3, completion_tokens=2)


def test_the_stop_string_can_be_kept() -> None:
    text = choice(SamplingParams(stop=("lo",), include_stop_str_in_output=True))
    assert text.push(StepOutput(1, tuple(TOKENIZER.encode("hello wo")))).text == "hello"


def test_a_stop_string_counts_only_from_min_tokens_on() -> None:
    a = TOKENIZER.encode("a")[0]
    text = choice(SamplingParams(stop=("a",), min_tokens=3, max_tokens=9))
    deltas = [text.push(StepOutput(1, (a,))) for _ in range(3)]
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("a", None), ("a", None), ("", "stop")]
    assert deltas[-1].usage == Usage(prompt_tokens=3, completion_tokens=3)


@pytest.mark.parametrize("finish_reason", ["stop", "length", "abort", "error"])
def test_held_back_text_is_flushed_on_every_ending(finish_reason: Any) -> None:
    text = choice(SamplingParams(stop=("hello wo!",)))
    half_emoji = TOKENIZER.encode("🙂")[0]
    assert text.push(StepOutput(1, (*TOKENIZER.encode("hello"),))).text == ""
    delta = text.push(StepOutput(1, (half_emoji,), finish_reason=finish_reason, error_message="why"))
    assert (delta.text, delta.finish_reason) == ("hello\ufffd", finish_reason)
    assert (delta.usage, delta.error_message) == (Usage(prompt_tokens=3, completion_tokens=2), "why")


def test_an_ending_without_tokens_flushes_too() -> None:
    text = choice(SamplingParams(stop=("hello!",)))
    text.push(StepOutput(1, (*TOKENIZER.encode("hello"),)))
    delta = text.push(StepOutput(1, finish_reason="abort"))
    assert (delta.text, delta.finish_reason, delta.token_ids) == ("hello", "abort", ())
    assert delta.usage == Usage(prompt_tokens=3, completion_tokens=1)


def test_logprobs_are_told_as_text_with_their_place_in_it() -> None:
    text = choice(SamplingParams(logprobs=2))
    hello, first, second = TOKENIZER.encode("hello🙂")
    steps = [
        StepOutput(1, (hello,), logprobs=(TokenLogprobs(-0.5, (hello, IM_END), (-0.5, -1.0)),)),
        StepOutput(1, (first,), logprobs=(TokenLogprobs(-2.0),)),
        StepOutput(1, (second,), logprobs=(TokenLogprobs(-3.0),), finish_reason="length"),
    ]
    entries = [entry for step in steps for entry in text.push(step).logprobs]
    assert [entry.token for entry in entries] == ["hello", "\\xf0\\x9f", "\\x99\\x82"]
    assert [entry.text_offset for entry in entries] == [0, 5, 5]
    assert [entry.logprob for entry in entries] == [-0.5, -2.0, -3.0]
    assert entries[0].top == (("hello", hello, -0.5), ("<|im_end|>", IM_END, -1.0))


def test_logprobs_are_left_out_unless_asked_for() -> None:
    assert choice().push(StepOutput(1, (5,), logprobs=(TokenLogprobs(-0.5),))).logprobs == ()


def test_a_continued_prompt_keeps_the_space_that_an_answer_drops() -> None:
    tokenizer = gguf_tokenizer(sentencepiece_metadata())
    stage = TextStage(tokenizer, ChatTemplate("x"), max_model_len=64, vocab_size=tokenizer.vocab_size)
    step = StepOutput(1, tuple(tokenizer.encode("hello", add_special_tokens=False)))
    assert choice(stage=stage, messages=HELLO).push(step).text == "hello"
    assert choice(stage=stage, text="x").push(step).text == " hello"


@given(
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 4), min_size=30, max_size=30),
    stop=st.lists(st.sampled_from(["a", "hello", "lo", "\ufffd", " w"]), max_size=2),
    ending=st.sampled_from(["stop", "length", "abort", "error"]),
)
def test_any_steps_give_one_ending_and_the_text_of_all_tokens(
    token_ids: list[int], cuts: list[int], stop: list[str], ending: Any
) -> None:
    text = choice(SamplingParams(stop=tuple(stop)))
    deltas = []
    remaining = list(token_ids)
    for cut in cuts:
        step, remaining = remaining[:cut], remaining[cut:]
        deltas.append(text.push(StepOutput(1, tuple(step), finish_reason=None if remaining else ending)))
    endings = [delta for delta in deltas if delta.finish_reason is not None]
    assert len(endings) == 1
    assert text.finished
    assert all((delta.usage is not None) == (delta.finish_reason is not None) for delta in deltas)
    whole = TOKENIZER.decode(token_ids)
    if endings[0].stop_reason is None:
        assert shown(deltas) == whole
        assert not any(one in whole for one in stop)
        assert endings[0].finish_reason == ending
    else:
        assert endings[0].finish_reason == "stop"
        assert whole.startswith(shown(deltas) + str(endings[0].stop_reason))
    assert endings[0].usage is not None
    assert endings[0].usage.completion_tokens == sum(len(delta.token_ids) for delta in deltas)
