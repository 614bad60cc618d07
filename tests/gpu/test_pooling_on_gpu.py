"""Prompts that are pooled on a GPU, beside graphs and with steps in flight: what a CPU makes of them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from engine.api.config import EngineConfig
from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from engine.loop import EngineLoop
from tests.fakes.checkpoints import write_hf_checkpoint

GREEDY = SamplingParams(temperature=0.0)
POOLINGS = (None, Pooling("embed"), Pooling("choice", choice_ids=(17, 41)), Pooling("embed", dimensions=8))


def some_prompts() -> list[Prompt]:
    chance = random.Random(6)
    shared = tuple(chance.randrange(3, 320) for _ in range(32))
    prompts = []
    for sequence_id in range(1, 41):
        own = tuple(chance.randrange(3, 320) for _ in range(chance.randint(1, 60)))
        token_ids = shared[: chance.choice([0, 16, 32])] + own
        prompts.append(Prompt(sequence_id, token_ids, 16, GREEDY, pooling=chance.choice(POOLINGS)))
    return prompts


def run(engine: EngineLoop) -> tuple[dict[int, list[int]], dict[int, np.ndarray]]:
    """Tokens and numbers of each prompt."""
    tokens: dict[int, list[int]] = {}
    numbers: dict[int, np.ndarray] = {}
    for prompt in some_prompts():
        engine.submit(prompt)
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error"
            if output.pooled:
                numbers[output.sequence_id] = np.frombuffer(output.pooled, dtype="<f4")
            else:
                tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
    return tokens, numbers


@pytest.mark.gpu
def test_pooled_prompts_and_tokens_are_those_of_a_cpu(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "qwen3")

    def load(device: str) -> EngineLoop:
        config = EngineConfig(
            model=str(tmp_path),
            device=device,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=16,
            max_num_batched_tokens=64,
        )
        return EngineLoop(config)

    expected_tokens, expected_numbers = run(load("cpu"))
    engine = load("cuda")
    for _ in range(2):
        tokens, numbers = run(engine)
        assert tokens == expected_tokens
        assert numbers.keys() == expected_numbers.keys()
        for sequence_id, expected in expected_numbers.items():
            np.testing.assert_allclose(numbers[sequence_id], expected, atol=1e-3)
        while engine.has_spare_work:
            engine.spare_step()
