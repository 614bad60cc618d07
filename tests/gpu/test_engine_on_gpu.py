"""The engine on an NVIDIA GPU gives the tokens that it gives on the CPU, in fp32, with steps in flight."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from tests.fakes.checkpoints import write_hf_checkpoint, write_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=40, seed=5, repetition_penalty=1.1, max_tokens=24, ignore_eos=True, logprobs=2
)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_hf_checkpoint(path, request.param)
    write_tokenizer(path)
    return path


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_kv_blocks", [None, 18], ids=["ample", "preempted"])
def test_tokens_equal_those_of_the_cpu(checkpoint: Path, sampling: SamplingParams, num_kv_blocks: int | None):
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 256) for _ in range(length)] for length in (3, 17, 32, 50, 64, 90)]
    inputs = [{"prompt_token_ids": prompt} for prompt in [*prompts, [*prompts[5][:70], 5, 6]]]
    tokens = {}
    for device in ("cpu", "cuda"):
        llm = LLM(
            checkpoint,
            dtype="float32",
            device=device,
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            num_kv_blocks=num_kv_blocks,
        )
        tokens[device] = [output.outputs[0].token_ids for output in llm.generate(inputs, sampling)]
        assert llm.stats().num_free_blocks == llm.stats().num_blocks
        assert bool(llm.stats().preemptions_total) == (num_kv_blocks is not None)
    assert tokens["cuda"] == tokens["cpu"]
