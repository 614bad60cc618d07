"""A sequence's scores do not depend on what else is computed with it, whatever the others are."""

from __future__ import annotations

import random

import pytest

from engine import LLM, SamplingParams
from engine.api.config import Quantization
from store.models import InstalledModel

BATCH = 32
SAMPLING = SamplingParams(temperature=0.0, max_tokens=6, logprobs=20, ignore_eos=True)


@pytest.mark.parametrize("quantization", ["auto", "int8", "none"])
def test_scores_alone_and_in_a_batch_of_32(starter: InstalledModel, quantization: Quantization):
    """The others repeat one token or mix all of the vocabulary, which gives the largest activations there are."""
    llm = LLM(
        starter.path, device="cpu", max_model_len=256, max_num_seqs=BATCH, quantization=quantization,
        enable_prefix_caching=False,
    )  # fmt: skip
    rng = random.Random(0)
    prompts = [[rng.randrange(llm.facts.vocab_size) for _ in range(rng.randint(1, 90))] for _ in range(BATCH)]
    prompts[1::4] = [[0] * 40, [1] * 7, [49_151] * 90, [17] * 33, [0], [2] * 64, [3] * 5, [28] * 80]
    together = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], SAMPLING)
    for index in (0, 1, 5, 18, 31):
        (alone,) = llm.generate({"prompt_token_ids": prompts[index]}, SAMPLING)
        found, expected = (output.outputs[0] for output in (together[index], alone))
        assert found.token_ids == expected.token_ids
        for one, other in zip(found.logprobs or (), expected.logprobs or (), strict=True):
            assert {token: pytest.approx(value, abs=1e-3) for token, _, value in other.top} == {
                token: value for token, _, value in one.top
            }
