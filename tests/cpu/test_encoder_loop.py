"""The engine of encoders: vectors and scores as transformers has them, whatever else is in a step."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine import LLM
from engine.api.config import EngineConfig
from engine.api.errors import (
    ContextLengthExceeded,
    EngineAsleep,
    EngineBusy,
    InsufficientMemory,
    InvalidParameter,
)
from engine.api.output import StepOutput
from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from engine.encoder_loop import EncoderLoop
from engine.engine import open_engine
from tests.fakes.checkpoints import VOCAB_SIZE, write_encoder_checkpoint, write_hf_checkpoint, write_tokenizer

MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def write_sentence_files(directory: Path, pooling: Mapping[str, Any], **general: Any) -> None:
    kinds = ("Transformer", "Pooling", "Normalize")
    steps = [{"path": f"{index}_{kind}" if index else "", "type": f"s.{kind}"} for index, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(steps if general.pop("normalize", True) else steps[:2]))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (directory / "config_sentence_transformers.json").write_text(json.dumps(general))


def open_encoder(path: Path, **config: Any) -> EncoderLoop:
    engine = open_engine(EngineConfig(model=str(path), device="cpu", num_threads=1, **config))
    assert isinstance(engine, EncoderLoop)
    return engine


def random_texts(count: int, longest: int = 128, seed: int = 0) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    lengths = [1, 2, longest, *(generator.randint(1, longest) for _ in range(count - 3))]
    return [tuple(generator.randrange(4, VOCAB_SIZE) for _ in range(length)) for length in lengths]


def submit(engine: EncoderLoop, texts: Sequence[tuple[int, ...]], pooling: Pooling = Pooling("embed")) -> None:  # noqa: B008
    for sequence_id, token_ids in enumerate(texts, start=1):
        engine.submit(Prompt(sequence_id, token_ids, 0, SamplingParams(), pooling=pooling))


def finish(engine: EncoderLoop) -> dict[int, StepOutput]:
    outputs: dict[int, StepOutput] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.sequence_id not in outputs, "one output for each text"
            outputs[output.sequence_id] = output
    return outputs


def vectors(
    engine: EncoderLoop,
    texts: Sequence[tuple[int, ...]],
    pooling: Pooling = Pooling("embed"),  # noqa: B008
) -> np.ndarray:
    submit(engine, texts, pooling)
    outputs = finish(engine)
    assert {output.finish_reason for output in outputs.values()} == {"stop"}
    return np.stack([np.frombuffer(outputs[one].pooled, dtype="<f4") for one in range(1, len(texts) + 1)])


def expected_states(path: Path, texts: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    oracle = transformers.AutoModel.from_pretrained(path).eval()
    with torch.inference_mode():
        return [oracle(torch.tensor([token_ids])).last_hidden_state[0].numpy() for token_ids in texts]


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize(("files", "mode"), [(MEAN, "mean"), (CLS, "cls"), (LAST, "last")])
def test_vectors_equal_transformers(family: str, files: dict[str, bool], mode: str, tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, family)
    write_sentence_files(tmp_path, files)
    engine, texts = open_encoder(tmp_path, max_num_batched_tokens=200), random_texts(12)
    pick = {"mean": lambda states: states.mean(axis=0), "cls": lambda states: states[0], "last": lambda s: s[-1]}[mode]
    expected = np.stack([unit(pick(states)) for states in expected_states(tmp_path, texts)])
    np.testing.assert_allclose(vectors(engine, texts), expected, atol=2e-6)
    facts = engine.facts
    assert (facts.task, facts.embedding_length, facts.max_model_len, facts.architecture) == ("embed", 64, 128, family)
    assert (facts.num_kv_blocks, facts.kv_bytes_per_token) == (0, 0)
    assert facts.fixed_bytes > facts.weight_bytes > 0


def test_a_vector_does_not_depend_on_its_company(tmp_path: Path) -> None:
    """Sums of other lengths are added in other orders, so the last bits may differ: by 1e-6 of a length of 1."""
    write_encoder_checkpoint(tmp_path, "bert")
    engine, texts = open_encoder(tmp_path), random_texts(20)
    together = vectors(engine, texts)
    alone = np.concatenate([vectors(engine, [token_ids]) for token_ids in texts])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    backwards = vectors(open_encoder(tmp_path, max_num_seqs=3), texts[::-1])[::-1]
    np.testing.assert_allclose(backwards, together, atol=1e-6)


def test_dimensions_cut_a_vector_and_make_it_whole_again(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert")
    engine, texts = open_encoder(tmp_path), random_texts(4)
    whole = vectors(engine, texts)
    cut = vectors(engine, texts, Pooling("embed", dimensions=10))
    np.testing.assert_allclose(cut, np.stack([unit(vector[:10]) for vector in whole]), atol=1e-6)


def test_lengths_stay_where_a_model_compares_by_dot_product(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert")
    write_sentence_files(tmp_path, MEAN, normalize=False, similarity_fn_name="dot")
    texts = random_texts(3)
    expected = np.stack([states.mean(axis=0) for states in expected_states(tmp_path, texts)])
    np.testing.assert_allclose(vectors(open_encoder(tmp_path), texts), expected, atol=2e-6)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_scores_of_pairs_equal_transformers(family: str, tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, family, role="ForSequenceClassification")
    engine, texts = open_encoder(tmp_path), random_texts(8)
    oracle = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for sequence_id, token_ids in enumerate(texts, start=1):
        pooling = Pooling("score", second_start=len(token_ids) // 2)
        engine.submit(Prompt(sequence_id, token_ids, 0, SamplingParams(), pooling=pooling))
    outputs = finish(engine)
    for sequence_id, token_ids in enumerate(texts, start=1):
        types = torch.zeros(1, len(token_ids), dtype=torch.long)
        if family == "bert" and len(token_ids) > 1:
            types[0, len(token_ids) // 2 :] = 1
        with torch.inference_mode():
            expected = oracle(torch.tensor([token_ids]), token_type_ids=types).logits.item()
        (score,) = np.frombuffer(outputs[sequence_id].pooled, dtype="<f4")
        assert score == pytest.approx(expected, abs=2e-5)
    assert (engine.facts.task, engine.facts.embedding_length) == ("score", 0)


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert")
    engine = open_encoder(tmp_path, max_model_len=20)

    def prompt(*token_ids: int, pooling: Pooling | None) -> Prompt:
        return Prompt(1, token_ids, 0, SamplingParams(), pooling=pooling)

    with pytest.raises(ContextLengthExceeded, match="holds 20"):
        engine.submit(prompt(*range(21), pooling=Pooling("embed")))
    for odd, words in (
        (prompt(1, pooling=None), "no text"),
        (prompt(1, pooling=Pooling("score")), "makes vectors"),
        (prompt(1, pooling=Pooling("embed", dimensions=65)), "1 to 64"),
        (prompt(1, VOCAB_SIZE, pooling=Pooling("embed")), "token ids"),
        (prompt(-1, pooling=Pooling("embed")), "token ids"),
        (prompt(pooling=Pooling("embed")), "no tokens"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            engine.submit(odd)
    assert not engine.has_work


def test_the_longest_text_is_the_least_of_what_is_asked_made_for_and_possible(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert")
    assert open_encoder(tmp_path, max_model_len=8192, max_num_batched_tokens=5).facts.max_model_len == 128
    write_sentence_files(tmp_path, MEAN)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40}))
    assert open_encoder(tmp_path, max_model_len=8192).facts.max_model_len == 40
    assert open_encoder(tmp_path, max_model_len=8).facts.max_model_len == 8


def test_aborted_texts_have_one_output_and_others_go_on(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert")
    engine, texts = open_encoder(tmp_path, max_num_seqs=2), random_texts(6)
    submit(engine, texts)
    first = engine.step()
    assert sorted(output.sequence_id for output in first) == [1, 2]
    aborted = engine.abort(4)
    assert aborted is not None and aborted.finish_reason == "abort"
    assert engine.abort(4) is None and engine.abort(1) is None and engine.abort(99) is None
    assert sorted(finish(engine)) == [3, 5, 6]
    assert engine.stats().prompt_tokens_total == sum(len(texts[index]) for index in (0, 1, 2, 4, 5))
    assert engine.stats().num_waiting == engine.stats().num_running == 0


def test_sleep_and_wake(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert")
    engine, texts = open_encoder(tmp_path), random_texts(3)
    before = vectors(engine, texts)
    submit(engine, texts)
    with pytest.raises(EngineBusy):
        engine.sleep()
    finish(engine)
    assert engine.sleep().is_asleep and engine.sleep().is_asleep
    with pytest.raises(EngineAsleep):
        submit(engine, texts)
    with pytest.raises(EngineAsleep):
        engine.resize_cache(5)
    memory = engine.wake(5)
    assert (memory.is_asleep, memory.num_kv_blocks, memory.max_model_len) == (False, 0, 128)
    assert engine.resize_cache(5) == memory
    np.testing.assert_array_equal(vectors(engine, texts), before)


def test_texts_that_were_aborted_in_flight_keep_no_model_awake(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert")
    engine, texts = open_encoder(tmp_path), random_texts(3)
    engine._pipeline_depth = 2
    submit(engine, texts)
    assert engine.step() == []
    with pytest.raises(EngineBusy):
        engine.sleep()
    for sequence_id in (1, 2, 3):
        assert engine.abort(sequence_id) is not None
    assert engine.sleep().is_asleep
    assert not engine.has_work
    engine.wake(0)
    assert len(vectors(engine, texts)) == 3


def test_a_step_that_fails_ends_its_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_encoder_checkpoint(tmp_path, "bert")
    engine, texts = open_encoder(tmp_path, max_num_seqs=2), random_texts(4)
    run = engine._runner._steps.run

    def fail_once(error: Exception) -> None:
        def run_or_fail(batch: Any) -> torch.Tensor:
            monkeypatch.setattr(engine._runner._steps, "run", run)
            raise error

        monkeypatch.setattr(engine._runner._steps, "run", run_or_fail)

    fail_once(torch.cuda.OutOfMemoryError("no memory"))
    submit(engine, texts)
    reasons = {sequence_id: output.finish_reason for sequence_id, output in finish(engine).items()}
    assert reasons == {1: "error", 2: "error", 3: "stop", 4: "stop"}
    fail_once(RuntimeError("broken"))
    submit(engine, texts)
    with pytest.raises(RuntimeError, match="broken"):
        engine.step()
    assert not engine.has_work
    assert len(vectors(engine, texts)) == 4


def test_numbers_beyond_the_format_are_an_error_of_their_text(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert")
    engine = open_encoder(tmp_path)
    run = engine._runner._steps.run
    engine._runner._steps.run = lambda batch: run(batch) * torch.tensor([[1.0], [float("inf")]])  # type: ignore[method-assign]
    submit(engine, [(5, 6), (7, 8, 9)])
    outputs = finish(engine)
    assert [outputs[one].finish_reason for one in (1, 2)] == ["stop", "error"]
    assert "another dtype" in str(outputs[2].error_message)


def test_steps_shrink_to_the_budget_but_hold_the_longest_text(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert")
    roomy = open_encoder(tmp_path, max_num_batched_tokens=1 << 16)
    small_budget = roomy.facts.fixed_bytes - 4 * (1 << 15) * 64
    shrunk = open_encoder(tmp_path, max_num_batched_tokens=1 << 16, memory_budget_bytes=small_budget)
    assert roomy.facts.fixed_bytes > shrunk.facts.fixed_bytes
    assert len(vectors(shrunk, random_texts(5))) == 5
    with pytest.raises(InsufficientMemory, match="memory budget"):
        open_encoder(tmp_path, memory_budget_bytes=roomy.facts.weight_bytes + 1000)
    with pytest.raises(InsufficientMemory, match="weights take"):
        open_encoder(tmp_path, memory_budget_bytes=roomy.facts.weight_bytes // 2)


def test_random_weights_need_a_config_alone(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "xlm-roberta")
    (tmp_path / "model.safetensors").unlink()
    assert np.isfinite(vectors(open_encoder(tmp_path, load_format="dummy"), random_texts(3))).all()


def test_a_reranker_scores_texts(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert", role="ForSequenceClassification")
    write_tokenizer(tmp_path)
    llm = LLM(tmp_path, device="cpu", num_threads=1)
    pairs = [("a question", "an answer"), ("a question", "the quick brown fox")]
    scores = llm.score(pairs)
    assert len(scores) == 2 and all(0 < score < 1 for score in scores) and scores[0] != scores[1]
    assert llm.score(pairs[::-1]) == pytest.approx(scores[::-1], abs=1e-6)
    with pytest.raises(InvalidParameter, match="scores pairs"):
        llm.embed("a question")


def test_a_chat_model_makes_neither(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "llama")
    write_tokenizer(tmp_path)
    llm = LLM(tmp_path, device="cpu", num_threads=1, max_model_len=64)
    for ask in (lambda: llm.embed("a"), lambda: llm.score([("a", "b")])):
        with pytest.raises(InvalidParameter, match="writes text"):
            ask()
