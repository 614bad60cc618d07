"""On a GPU, vectors and scores in half precision are close to float32 on the CPU, in any company, and after a sleep."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.api.config import EngineConfig
from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from engine.attention.ragged import TorchRaggedAttention, VarlenAttention
from engine.encoder_loop import EncoderLoop
from tests.fakes.checkpoints import VOCAB_SIZE, write_encoder_checkpoint

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "max_position_embeddings": 514}
BUDGET_BYTES = 8 * 2**30


def open_encoder(path: Path, device: str, **config: Any) -> EncoderLoop:
    return EncoderLoop(EngineConfig(model=str(path), device=device, memory_budget_bytes=BUDGET_BYTES, **config))


def texts(count: int = 200, seed: int = 0) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    lengths = [1, 512, *(generator.randint(1, 300) for _ in range(count - 2))]
    return [tuple(generator.randrange(4, VOCAB_SIZE) for _ in range(length)) for length in lengths]


def pooled(engine: EncoderLoop, token_ids: list[tuple[int, ...]], pooling: Pooling) -> np.ndarray:
    for number, ids in enumerate(token_ids, start=1):
        engine.submit(Prompt(number, ids, 0, SamplingParams(), pooling=pooling))
    outputs = {}
    while engine.has_work:
        outputs.update({output.sequence_id: output for output in engine.step()})
    assert all(output.finish_reason == "stop" for output in outputs.values())
    return np.stack([np.frombuffer(outputs[one].pooled, dtype="<f4") for one in range(1, len(token_ids) + 1)])


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return (first * second).sum(axis=1)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
@pytest.mark.parametrize(("dtype", "distance"), [("auto", 1e-4), ("float16", 1e-4), ("bfloat16", 5e-3)])
def test_vectors_are_close_to_the_cpus(family: str, dtype: Any, distance: float, tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, family, **SIZES)
    exact = pooled(open_encoder(tmp_path, "cpu"), texts(), Pooling("embed"))
    engine = open_encoder(tmp_path, "cuda", dtype=dtype)
    assert engine.facts.dtype == ("float16" if dtype == "auto" else dtype)
    assert 1 - cosines(pooled(engine, texts(), Pooling("embed")), exact).min() <= distance


@pytest.mark.gpu
def test_float32_equals_the_cpu(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert", **SIZES)
    exact = pooled(open_encoder(tmp_path, "cpu"), texts(40), Pooling("embed"))
    vectors = pooled(open_encoder(tmp_path, "cuda", dtype="float32"), texts(40), Pooling("embed"))
    np.testing.assert_allclose(vectors, exact, atol=2e-3)
    assert 1 - cosines(vectors, exact).min() <= 1e-5


@pytest.mark.gpu
def test_scores_are_close_to_the_cpus(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "xlm-roberta", role="ForSequenceClassification", **SIZES)
    exact = pooled(open_encoder(tmp_path, "cpu"), texts(), Pooling("score"))
    scores = pooled(open_encoder(tmp_path, "cuda"), texts(), Pooling("score"))
    np.testing.assert_allclose(scores, exact, atol=2e-2)


@pytest.mark.gpu
def test_company_does_not_matter(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert", **SIZES)
    together = pooled(open_encoder(tmp_path, "cuda"), texts(), Pooling("embed"))
    few = pooled(open_encoder(tmp_path, "cuda", max_num_seqs=3), texts(), Pooling("embed"))
    assert 1 - cosines(together, few).min() <= 1e-5


@pytest.mark.gpu
def test_vectors_are_the_same_after_a_sleep(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert", **SIZES)
    engine = open_encoder(tmp_path, "cuda")
    before = pooled(engine, texts(), Pooling("embed"))
    assert engine.sleep().is_asleep
    assert not engine.wake(0).is_asleep
    np.testing.assert_array_equal(pooled(engine, texts(), Pooling("embed")), before)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_kernel_for_all_texts_equals_one_for_each_length(head_dim: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    assert VarlenAttention.is_supported(head_dim, dtype, device)
    lengths = (1, 1, 7, 64, 65, 300)
    qkv = torch.randn(sum(lengths), 3 * 4 * head_dim, device=device, dtype=dtype)
    ours, reference = VarlenAttention(4, head_dim, device), TorchRaggedAttention(4, head_dim)
    with torch.inference_mode():
        for attention in (ours, reference):
            attention.begin_step(lengths)
        torch.testing.assert_close(ours.attend(qkv), reference.attend(qkv), atol=1e-2, rtol=1e-2)
