"""The offline API: what it accepts, what it returns, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from engine.api.config import EngineConfig
from engine.api.errors import ContextLengthExceeded, InsufficientMemory, InvalidParameter
from engine.api.request import Prompt
from engine.loop import EngineLoop
from engine.runner.largest_step import largest_step
from engine.runner.model_runner import ModelRunner
from store.errors import ModelNotFound
from store.models import ModelStore
from store.paths import DataRoot
from store.presets.derive import create_model
from store.presets.preset import Parameters, Preset
from tests.fakes.checkpoints import write_hf_checkpoint, write_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_hf_checkpoint(path, "llama")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, device="cpu", max_model_len=128, max_num_seqs=4)


def test_prompts_come_as_text_as_token_ids_or_in_mappings(llm: LLM):
    by_text = llm.generate("the quick brown fox", GREEDY)[0]
    token_ids = list(by_text.prompt_token_ids)
    variants = llm.generate([{"prompt": "the quick brown fox"}, {"prompt_token_ids": token_ids}, token_ids], GREEDY)
    assert by_text.prompt == "the quick brown fox"
    assert [variant.prompt for variant in variants] == ["the quick brown fox", None, None]
    for variant in variants:
        assert list(variant.prompt_token_ids) == token_ids
        assert variant.outputs[0].token_ids == by_text.outputs[0].token_ids
        assert variant.outputs[0].text == by_text.outputs[0].text
        assert variant.outputs[0].finish_reason == "length"


def test_each_prompt_may_have_its_own_sampling_params(llm: LLM):
    short, long = (SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (2, 9))
    outputs = llm.generate(["the dog", "the fox"], [short, long])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 9]
    with pytest.raises(InvalidParameter, match="2 prompts but 1 sampling params"):
        llm.generate(["the dog", "the fox"], [short])


def test_logprobs_are_there_when_asked_for(llm: LLM):
    asked = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)
    output = llm.generate("the dog", asked)[0].outputs[0]
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    for entry in output.logprobs:
        assert entry.logprob == pytest.approx(entry.top[0][2])
        assert len(entry.top) == 2
    assert llm.generate("the dog", GREEDY)[0].outputs[0].logprobs is None


def test_a_stop_string_ends_the_text_and_frees_the_blocks(llm: LLM):
    text = llm.generate("the quick brown fox", GREEDY)[0].outputs[0].text
    stop = text[2:4]
    output = llm.generate("the quick brown fox", SamplingParams(temperature=0.0, ignore_eos=True, stop=(stop,)))[0]
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_chat_takes_one_conversation_or_several(llm: LLM):
    hello = [{"role": "user", "content": "hello"}]
    (single,) = llm.chat(hello, GREEDY)
    several = llm.chat([hello, [*hello, {"role": "assistant", "content": "hi"}, hello[0]]], GREEDY)
    assert several[0].outputs[0].token_ids == single.outputs[0].token_ids
    assert len(several[1].prompt_token_ids) > len(single.prompt_token_ids)


def test_what_cannot_run_is_refused_before_anything_starts(llm: LLM):
    with pytest.raises(ContextLengthExceeded) as refused:
        llm.generate([[5, 6], list(range(3, 203))], GREEDY)
    assert (refused.value.needed_tokens, refused.value.available_tokens) == (201, 128)
    with pytest.raises(InvalidParameter, match="prompt mapping"):
        llm.generate({"text": "hello"}, GREEDY)
    with pytest.raises(InvalidParameter, match="temperature"):
        llm.generate("hello", SamplingParams(temperature=-1.0))
    assert llm.stats().num_waiting == llm.stats().num_running == 0


def test_random_weights_need_a_config_alone(checkpoint: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    llm = LLM(tmp_path, load_format="dummy", device="cpu", max_model_len=64, max_num_seqs=2)
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 3, GREEDY)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8, 8]


def test_the_engine_can_be_driven_step_by_step(llm: LLM):
    llm.engine.submit(Prompt(10**9, (5, 6, 7), 3, GREEDY))
    token_ids: list[int] = []
    while llm.engine.has_work:
        for output in llm.engine.step():
            assert output.sequence_id == 10**9
            token_ids.extend(output.token_ids)
    assert tuple(token_ids) == llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids[:3]


def test_a_name_that_is_not_installed_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    with pytest.raises(ModelNotFound, match="quire pull"):
        LLM("qwen3:0.6b")


def test_a_context_beyond_the_models_is_refused(checkpoint: Path):
    with pytest.raises(InvalidParameter, match="max_model_len"):
        LLM(checkpoint, device="cpu", max_model_len=100_000)


def test_weights_beyond_the_budget_are_refused_before_they_are_read(checkpoint: Path):
    stages: list[str] = []
    config = EngineConfig(model=str(checkpoint), device="cpu", memory_budget_bytes=2**16)
    with pytest.raises(InsufficientMemory, match="choose a smaller model"):
        EngineLoop(config, lambda stage, _done, _total: stages.append(stage))
    assert stages == ["reading the checkpoint"]


def test_a_step_without_memory_ends_its_sequences_and_nothing_else(llm: LLM):
    """The engine answers each open sequence with an error and serves the next request."""
    exhausted = pytest.MonkeyPatch()
    exhausted.setattr(ModelRunner, "launch", _run_out_of_memory)
    llm.engine.submit(Prompt(10**9 + 1, (5, 6, 7), 3, GREEDY))
    (output,) = llm.engine.step()
    exhausted.undo()
    assert (output.sequence_id, output.finish_reason) == (10**9 + 1, "error")
    assert output.error_message is not None and "ran out of memory" in output.error_message
    assert not llm.engine.has_work
    assert llm.stats().num_free_blocks == llm.stats().num_blocks
    assert len(llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids) > 0


def test_a_context_without_room_for_an_answer_is_refused(checkpoint: Path):
    with pytest.raises(InvalidParameter, match="at least 2"):
        LLM(checkpoint, device="cpu", max_model_len=1)


def test_the_largest_step_runs_on_a_cache_of_one_block(llm: LLM, checkpoint: Path):
    engine = EngineLoop(EngineConfig(model=str(checkpoint), device="cpu", max_model_len=64, max_num_seqs=5))
    batch = largest_step(num_tokens=48, max_num_seqs=5, max_model_len=64)
    assert (batch.num_tokens, len(batch.sequences)) == (48, 5)
    sampled = engine._runner.launch(batch).wait()
    assert len(sampled.token_ids) == 5
    assert all(logprobs is not None for logprobs in sampled.logprobs)


def test_an_interrupted_run_leaves_nothing_behind(llm: LLM):
    """Blocks that were scheduled and never computed must not serve the next prompt with the same beginning."""
    prompt = {"prompt_token_ids": [7 + i % 40 for i in range(70)]}
    interrupted = pytest.MonkeyPatch()
    interrupted.setattr(ModelRunner, "launch", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, GREEDY)
    interrupted.undo()
    after = llm.generate(prompt, GREEDY)[0]
    assert after.num_cached_tokens == 0
    again = llm.generate(prompt, GREEDY)[0]
    assert again.num_cached_tokens == 64
    assert again.outputs[0].token_ids == after.outputs[0].token_ids
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def _run_out_of_memory(*arguments: object) -> None:
    raise torch.cuda.OutOfMemoryError("no memory for this step")


def _interrupt(*_arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_model_of_ones_own_opens_every_chat(
    llm: LLM, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "state"))
    store = ModelStore(DataRoot.open())
    preset = Preset(
        system="the lazy dog", template="{{ messages | length }}{{ messages[0].content }}",
        parameters=Parameters(context_length=64),
    )  # fmt: skip
    create_model(store, str(checkpoint), "poet", preset)
    poet = LLM("poet", device="cpu", max_model_len=128, max_num_seqs=1)
    assert poet.facts.max_model_len == 64
    answer = poet.chat([{"role": "user", "content": "the quick brown fox"}], GREEDY)[0]
    expected = llm.generate("2the lazy dog", GREEDY)[0]
    assert answer.prompt_token_ids == expected.prompt_token_ids
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_budget_in_bytes_is_meant_as_it_is_and_a_share_of_ram_is_not(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("engine.sizing.CPU_MAX_CACHE_BYTES", 1)
    limits = {"model": str(checkpoint), "device": "cpu", "max_model_len": 64, "max_num_seqs": 2}
    assert EngineLoop(EngineConfig(**limits, memory_budget_bytes=2**33)).facts.num_kv_blocks == 2 * 64 // 16
    assert EngineLoop(EngineConfig(**limits)).facts.num_kv_blocks == 1
