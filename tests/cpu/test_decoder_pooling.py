"""Prompts that a decoder pools instead of continuing them, against transformers, on both backends of a CPU."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from engine.api.config import EngineConfig
from engine.api.errors import BrokenCheckpoint, ContextLengthExceeded, InvalidParameter
from engine.api.output import POOLED_OVERFLOW, StepOutput
from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from engine.loop import EngineLoop
from engine.runner.recorded_steps import RecordedSteps
from tests.fakes.checkpoints import VOCAB_SIZE, write_hf_checkpoint

GREEDY = SamplingParams(temperature=0.0)
NO_SAMPLING = SamplingParams()
HIDDEN_SIZE = 64
EMBED = Pooling("embed")
CHOICE = Pooling("choice", choice_ids=(17, 41))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def write_embedder(path: Path, **config: object) -> None:
    """A Qwen3 saved without its head, with the files of sentence-transformers: as Qwen3-Embedding is published."""
    write_hf_checkpoint(path, "qwen3", **config)
    transformers.AutoModel.from_pretrained(path).save_pretrained(path)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    (path / "modules.json").write_text(
        json.dumps(
            [
                {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
                for index, (kind, folder) in enumerate(modules)
            ]
        )
    )
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))


def open_loop(path: Path, **settings: object) -> EngineLoop:
    config = {"max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 48, "num_kv_blocks": 24}
    return EngineLoop(EngineConfig(model=str(path), device="cpu", block_size=16, **(config | settings)))


@pytest.fixture(scope="module", params=["compiled", "torch"])
def is_compiled(request: pytest.FixtureRequest) -> bool:
    return request.param == "compiled"


@pytest.fixture(scope="module")
def chat_path(is_compiled: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that the compiled path serves, or does not."""
    path = tmp_path_factory.mktemp("qwen3")
    write_hf_checkpoint(path, "qwen3", intermediate_size=128 if is_compiled else 120)
    return path


@pytest.fixture(scope="module")
def chat(chat_path: Path, is_compiled: bool) -> EngineLoop:
    loop = open_loop(chat_path)
    assert isinstance(loop._runner.replayed, RecordedSteps) == is_compiled
    return loop


@pytest.fixture(scope="module")
def embedder_path(is_compiled: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedder")
    write_embedder(path, intermediate_size=128 if is_compiled else 120, tie_word_embeddings=False)
    return path


@pytest.fixture(scope="module")
def embedder(embedder_path: Path) -> EngineLoop:
    return open_loop(embedder_path)


def run(engine: EngineLoop, prompts: Sequence[Prompt]) -> dict[int, list[StepOutput]]:
    outputs: dict[int, list[StepOutput]] = {prompt.sequence_id: [] for prompt in prompts}
    for prompt in prompts:
        engine.submit(prompt)
    while engine.has_work:
        for output in engine.step():
            outputs[output.sequence_id].append(output)
    return outputs


def pooled(outputs: Sequence[StepOutput]) -> np.ndarray:
    """The numbers of the one output of a pooled prompt."""
    (output,) = outputs
    assert (output.finish_reason, output.token_ids, output.error_message) == ("stop", (), None)
    return np.frombuffer(output.pooled, dtype="<f4")


def some_ids(chance: random.Random, length: int) -> tuple[int, ...]:
    return tuple(chance.randrange(3, VOCAB_SIZE) for _ in range(length))


def reference_states(path: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Of the last token, after the final norm."""
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).last_hidden_state[0, -1]


def reference_logits(path: Path, token_ids: Sequence[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, -1]


def unit(states: torch.Tensor) -> np.ndarray:
    return (states / states.norm()).numpy()


def test_vectors_are_those_of_transformers(embedder: EngineLoop, embedder_path: Path) -> None:
    chance = random.Random(1)
    texts = {length: some_ids(chance, length) for length in (1, 2, 15, 16, 17, 48, 49, 95, 96)}
    outputs = run(embedder, [Prompt(n, ids, 0, NO_SAMPLING, pooling=EMBED) for n, ids in texts.items()])
    for length, token_ids in texts.items():
        vector = pooled(outputs[length])
        assert vector.shape == (HIDDEN_SIZE,)
        np.testing.assert_allclose(vector, unit(reference_states(embedder_path, token_ids)), atol=1e-5)


def test_first_components_get_length_one_anew(embedder: EngineLoop, embedder_path: Path) -> None:
    token_ids = some_ids(random.Random(2), 20)
    poolings = {1: Pooling("embed", dimensions=1), 24: Pooling("embed", dimensions=24), 64: EMBED}
    outputs = run(embedder, [Prompt(n, token_ids, 0, NO_SAMPLING, pooling=kind) for n, kind in poolings.items()])
    states = reference_states(embedder_path, token_ids)
    for dimensions in poolings:
        np.testing.assert_allclose(pooled(outputs[dimensions]), unit(states[:dimensions]), atol=1e-5)


def test_choices_are_probabilities_of_the_next_token(chat: EngineLoop, chat_path: Path) -> None:
    chance = random.Random(3)
    texts = {length: some_ids(chance, length) for length in (1, 16, 33, 90)}
    outputs = run(chat, [Prompt(n, ids, 0, NO_SAMPLING, pooling=CHOICE) for n, ids in texts.items()])
    for length, token_ids in texts.items():
        logits = reference_logits(chat_path, token_ids)[list(CHOICE.choice_ids or ())]
        assert pooled(outputs[length])[0] == pytest.approx(logits.softmax(0)[0].item(), abs=1e-5)


@pytest.mark.parametrize("depth", [1, 2])
def test_vectors_choices_and_tokens_of_one_batch_do_not_disturb_one_another(
    chat: EngineLoop, chat_path: Path, is_compiled: bool, depth: int
) -> None:
    chance = random.Random(4)
    shared = some_ids(chance, 32)
    prompts = []
    for sequence_id in range(1, 25):
        pooling = chance.choice([None, EMBED, CHOICE, Pooling("embed", dimensions=8)])
        token_ids = shared[: chance.choice([0, 16, 32])] + some_ids(chance, chance.randint(1, 40))
        prompts.append(Prompt(sequence_id, token_ids, 12, GREEDY, pooling=pooling))
    alone = {prompt.sequence_id: run(chat, [prompt])[prompt.sequence_id] for prompt in prompts}
    chat._scheduler.forget_prefixes()
    chat._scheduler.reset_stats()
    # Recorded steps keep their results until the next one only, so those never have two in flight.
    chat._pipeline_depth = 1 if is_compiled else depth
    together = run(chat, prompts)
    chat._pipeline_depth = 1
    for prompt in prompts:
        expected, got = alone[prompt.sequence_id], together[prompt.sequence_id]
        if prompt.pooling is None:
            assert [output.token_ids for output in got] == [output.token_ids for output in expected]
        else:
            np.testing.assert_allclose(pooled(got), pooled(expected), atol=1e-5)
    stats = chat.stats()
    assert stats.generation_tokens_total == 12 * sum(prompt.pooling is None for prompt in prompts)
    assert stats.prompt_tokens_total == sum(len(prompt.token_ids) for prompt in prompts)
    assert stats.prefix_hit_tokens_total > 0
    assert stats.num_free_blocks == stats.num_blocks


def test_a_prefix_that_is_cached_is_not_computed_again(embedder: EngineLoop) -> None:
    token_ids = some_ids(random.Random(5), 64)
    (first,) = run(embedder, [Prompt(1, token_ids, 0, NO_SAMPLING, pooling=EMBED)])[1]
    (again,) = run(embedder, [Prompt(2, token_ids, 0, NO_SAMPLING, pooling=EMBED)])[2]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    np.testing.assert_allclose(pooled([again]), pooled([first]), atol=1e-6)


def test_an_embedder_is_known_by_its_files_and_makes_nothing_else(embedder: EngineLoop) -> None:
    facts = embedder.facts
    assert (facts.task, facts.embedding_length) == ("embed", HIDDEN_SIZE)
    for pooling in (None, CHOICE):
        with pytest.raises(InvalidParameter, match="makes vectors"):
            embedder.submit(Prompt(1, (5, 6), 3, GREEDY, pooling=pooling))


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        (Pooling("score"), "no classification head"),
        (Pooling("choice"), "between two of the model's 320 tokens"),
        (Pooling("choice", choice_ids=(5, VOCAB_SIZE)), "between two of the model's 320 tokens"),
        (Pooling("embed", dimensions=0), "give 1 to 64"),
        (Pooling("embed", dimensions=65), "dimensions is 65, and the model's vectors have 64"),
    ],
)
def test_what_cannot_be_made_is_refused(chat: EngineLoop, pooling: Pooling, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        chat.submit(Prompt(1, (5, 6), 0, NO_SAMPLING, pooling=pooling))
    assert not chat.has_work


def test_a_pooled_prompt_may_fill_the_context_but_no_more(chat: EngineLoop) -> None:
    with pytest.raises(ContextLengthExceeded) as refused:
        chat.submit(Prompt(1, (5,) * 97, 0, NO_SAMPLING, pooling=EMBED))
    assert (refused.value.needed_tokens, refused.value.available_tokens) == (97, 96)
    assert len(pooled(run(chat, [Prompt(2, (5,) * 96, 0, NO_SAMPLING, pooling=EMBED)])[2])) == HIDDEN_SIZE


def test_numbers_beyond_the_format_are_an_error_of_one_prompt(
    chat: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowing(hidden: torch.Tensor) -> torch.Tensor:
        states = hidden.clone()
        states[0] = float("inf")
        return states

    monkeypatch.setattr(chat._runner._model, "final_states", overflowing)
    prompts = [Prompt(n, (5, 6, n), 0, NO_SAMPLING, pooling=EMBED) for n in (7, 8)]
    outputs = run(chat, prompts)
    (failed,) = (n for n in outputs if outputs[n][0].finish_reason == "error")
    assert outputs.pop(failed) == [StepOutput(failed, finish_reason="error", error_message=POOLED_OVERFLOW)]
    (other,) = outputs.values()
    assert len(pooled(other)) == HIDDEN_SIZE


def test_a_model_without_its_head_cannot_be_asked_to_continue_texts(embedder_path: Path, tmp_path: Path) -> None:
    """Nothing beside it says that it makes vectors."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((embedder_path / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(BrokenCheckpoint, match="lacks the head that continues a text"):
        open_loop(tmp_path)
