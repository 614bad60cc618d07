"""The whole engine against transformers: greedy tokens of tiny random checkpoints in fp32.

Each family is run alone and in a ragged batch of 8, with chunked prefill and prefix caching on
and off, through a forced preemption, and (where it exists) from GGUF.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from tests.fakes.checkpoints import write_gguf_checkpoint, write_hf_checkpoint, write_tokenizer

FAMILIES = ["llama", "qwen2", "qwen3"]
NUM_NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_hf_checkpoint(path, request.param)
    write_tokenizer(path)
    return path


def ragged_prompts(vocab_size: int = 256) -> list[list[int]]:
    """Eight prompts of 3 to 90 tokens; two pairs share a long prefix, one is exactly whole blocks."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in (3, 17, 32, 50, 64, 90)]
    return [*prompts, [*prompts[3][:40], 5, 6, 7], prompts[5][:64] + [9] * 10]


def expected_tokens(path: Path, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_NEW_TOKENS,
                min_new_tokens=NUM_NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        expected.append(tuple(output[0, len(prompt) :].tolist()))
    return expected


def generate(path: Path, prompts: Sequence[Sequence[int]], **settings: Any) -> list[tuple[int, ...]]:
    llm = LLM(path, dtype="float32", device="cpu", **{"max_model_len": 256, "max_num_seqs": 8, **settings})
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(prompts)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix-cache", "no-prefix-cache"])
def test_a_ragged_batch_equals_transformers(checkpoint: Path, chunked: bool, prefix_caching: bool):
    prompts = ragged_prompts()
    tokens = generate(
        checkpoint,
        prompts,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=prefix_caching,
        max_num_batched_tokens=48 if chunked else None,
    )
    assert tokens == expected_tokens(checkpoint, prompts)


def test_each_prompt_alone_equals_transformers(checkpoint: Path):
    """One engine, one prompt after another: later ones hit the prefix cache of earlier ones."""
    prompts = ragged_prompts()
    llm = LLM(checkpoint, dtype="float32", device="cpu", max_model_len=256)
    outputs = [llm.generate({"prompt_token_ids": prompt}, GREEDY)[0] for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected_tokens(checkpoint, prompts)
    assert outputs[6].num_cached_tokens == 32
    assert outputs[7].num_cached_tokens == 64


def test_preempted_sequences_continue_as_if_nothing_happened(checkpoint: Path):
    prompts = ragged_prompts()
    llm = LLM(checkpoint, dtype="float32", device="cpu", max_model_len=128, max_num_seqs=8, num_kv_blocks=18)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    assert llm.stats().preemptions_total > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected_tokens(checkpoint, prompts)


@pytest.mark.parametrize("block_size", [32, 64])
def test_larger_blocks_give_the_same_tokens(checkpoint: Path, block_size: int):
    prompts = ragged_prompts()
    assert generate(checkpoint, prompts, block_size=block_size) == generate(checkpoint, prompts)


def test_llama_from_gguf_equals_llama_from_safetensors(tmp_path: Path):
    directory = tmp_path / "hf"
    directory.mkdir()
    write_hf_checkpoint(directory, "llama")
    write_tokenizer(directory)
    gguf = tmp_path / "llama.gguf"
    write_gguf_checkpoint(gguf, directory, "F32")
    prompts = ragged_prompts()
    assert generate(gguf, prompts) == expected_tokens(directory, prompts)


def test_sixteen_long_requests_in_a_pool_of_a_few_blocks_all_finish(checkpoint: Path):
    """Paging is real: the pool holds one and a half contexts, and every text is what it is alone."""
    prompts = [prompt for prompt in ragged_prompts() for _ in range(2)]
    llm = LLM(checkpoint, dtype="float32", device="cpu", max_model_len=128, max_num_seqs=16, num_kv_blocks=12)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == generate(checkpoint, prompts, max_num_seqs=1)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


def test_seeded_sampling_repeats_itself_whatever_shares_the_batch(checkpoint: Path):
    llm = LLM(checkpoint, dtype="float32", device="cpu", max_model_len=256, max_num_seqs=8)
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=16, ignore_eos=True)
    prompt = {"prompt_token_ids": ragged_prompts()[1]}
    alone = llm.generate(prompt, seeded)[0].outputs[0].token_ids
    others = [{"prompt_token_ids": p} for p in ragged_prompts()[2:6]]
    mixed = llm.generate([*others, prompt], [GREEDY] * len(others) + [seeded])
    assert mixed[-1].outputs[0].token_ids == alone
    several = llm.generate(prompt, msgspec.structs.replace(seeded, n=3))
    choices = [choice.token_ids for choice in several[0].outputs]
    assert choices[0] == alone
    assert len(set(choices)) == 3
