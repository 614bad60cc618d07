"""The whole engine on Triton kernels gives the tokens it gives on torch alone: here in the interpreter, in fp32.

Only what a device without an NVIDIA GPU cannot have is left out: graphs and steps in flight (tests/gpu).
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import engine.build
import engine.models.decoder
import engine.runner.rows
from engine import LLM, SamplingParams
from engine.attention.triton_paged import TritonPagedAttention
from engine.kernels.gather_step import gather_step
from engine.kernels.triton_ops import TritonOps
from tests.fakes.checkpoints import write_hf_checkpoint, write_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def generate(checkpoint: Path) -> list[tuple[int, ...]]:
    """Prompts that are chunked, mixed with decodes, and share a prefix."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 256) for _ in range(length)] for length in (3, 17, 40)]
    llm = LLM(checkpoint, dtype="float32", device="cpu", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32)
    inputs = [{"prompt_token_ids": prompt} for prompt in [*prompts, [*prompts[2][:32], 7]]]
    return [output.outputs[0].token_ids for output in llm.generate(inputs, GREEDY)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here; tests/gpu compares whole engines")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokens_equal_those_of_torch(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf_checkpoint(tmp_path, family)
    write_tokenizer(tmp_path)
    expected = generate(tmp_path)

    monkeypatch.setattr(engine.models.decoder, "select_ops", lambda device: TritonOps())
    monkeypatch.setattr(engine.build, "select_backend", TritonPagedAttention)
    monkeypatch.setattr(TritonPagedAttention, "is_capturable", False)
    monkeypatch.setattr(engine.runner.rows, "select_gather", lambda device: gather_step)
    assert generate(tmp_path) == expected
