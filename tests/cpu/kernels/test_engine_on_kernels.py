"""The whole engine on Triton kernels gives the tokens it gives on torch alone: here in the interpreter, in fp32.

Only what a device without an NVIDIA GPU cannot have is left out: graphs and steps in flight (tests/gpu).  Between
them the two families have all that a decoder may have: biases, and norms of heads.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import engine.build
import engine.models.decoder
import engine.runner.rows
from engine import LLM, SamplingParams
from engine.api.request import Pooling, Prompt
from engine.attention.backend import AttentionBackend
from engine.attention.torch_paged import TorchPagedAttention
from engine.attention.triton_paged import TritonPagedAttention
from engine.kernels.gather_step import gather_step
from engine.kernels.triton_ops import TritonOps
from engine.loop import EngineLoop
from tests.fakes.checkpoints import write_hf_checkpoint, write_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def load(checkpoint: Path, attention: type[AttentionBackend]) -> LLM:
    llm = LLM(checkpoint, dtype="float32", device="cpu", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32)
    assert isinstance(llm.engine, EngineLoop)
    assert isinstance(llm.engine._attention, attention)
    return llm


def generate(llm: LLM) -> list[tuple[int, ...]]:
    """Prompts that are chunked, mixed with decodes, and share a prefix."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 256) for _ in range(length)] for length in (3, 33)]
    inputs = [{"prompt_token_ids": prompt} for prompt in [*prompts, [*prompts[1][:16], 7]]]
    return [output.outputs[0].token_ids for output in llm.generate(inputs, GREEDY)]


def pool(llm: LLM) -> dict[int, np.ndarray]:
    """Prompts that are pooled beside one that is continued."""
    choice = Pooling("choice", choice_ids=(17, 41))
    for sequence_id, pooling in enumerate([None, Pooling("embed"), choice, Pooling("embed", dimensions=8)], start=1):
        llm.engine.submit(Prompt(sequence_id, tuple(range(5, 5 + 4 * sequence_id)), 1, GREEDY, pooling=pooling))
    pooled = {}
    while llm.engine.has_work:
        for output in llm.engine.step():
            if output.pooled:
                pooled[output.sequence_id] = np.frombuffer(output.pooled, dtype="<f4")
    return pooled


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here; tests/gpu compares whole engines")
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_tokens_and_vectors_equal_those_of_torch(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A width that the compiled path of a CPU does not serve, and as little as the interpreter's pace allows.
    write_hf_checkpoint(tmp_path, family, intermediate_size=120, num_hidden_layers=1)
    write_tokenizer(tmp_path)
    on_torch = load(tmp_path, TorchPagedAttention)
    expected, expected_pooled = generate(on_torch), pool(on_torch)

    monkeypatch.setattr(engine.models.decoder, "select_ops", lambda device: TritonOps())
    monkeypatch.setattr(engine.build, "select_backend", TritonPagedAttention)
    monkeypatch.setattr(TritonPagedAttention, "is_capturable", False)
    monkeypatch.setattr(engine.runner.rows, "select_gather", lambda device: gather_step)
    on_kernels = load(tmp_path, TritonPagedAttention)
    assert generate(on_kernels) == expected
    pooled = pool(on_kernels)
    assert pooled.keys() == expected_pooled.keys() == {2, 3, 4}
    for sequence_id, numbers in pooled.items():
        np.testing.assert_allclose(numbers, expected_pooled[sequence_id], atol=1e-5)
