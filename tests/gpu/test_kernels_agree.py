"""On a GPU, bf16 stays close to fp32 on the CPU, and the way a batch is cut changes nothing beyond rounding."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from tests.fakes.checkpoints import write_hf_checkpoint, write_tokenizer
from tests.fakes.teacher import Teacher

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
MAX_LEN = 160


def sequences(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 320) for _ in range(rng.randint(2, MAX_LEN))] for _ in range(count)]


def of_next_tokens(logprobs: list[torch.Tensor], tokens: list[list[int]]) -> torch.Tensor:
    """The logprob of each token given those before it, over all sequences."""
    return torch.cat(
        [
            lines[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            for lines, ids in zip(logprobs, tokens, strict=True)
        ]
    )


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_hf_checkpoint(path, request.param, dtype=torch.bfloat16, **SIZES)
    write_tokenizer(path)
    return path


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_bf16_is_close_to_fp32(checkpoint: Path, block_size: int) -> None:
    tokens = sequences(8)
    exact = Teacher(checkpoint, device=CPU, dtype=torch.float32, max_len=MAX_LEN).logprobs(tokens, MAX_LEN)
    teacher = Teacher(checkpoint, device=GPU, dtype=torch.bfloat16, max_len=MAX_LEN, block_size=block_size)
    for chunk in (1, 48, MAX_LEN):
        error = (of_next_tokens(teacher.logprobs(tokens, chunk), tokens) - of_next_tokens(exact, tokens)).abs()
        assert error.mean() < 2e-2, f"chunk {chunk}: mean {error.mean():.4f}, largest {error.max():.4f}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_chunks_nor_company_matter(checkpoint: Path, dtype: torch.dtype) -> None:
    teacher = Teacher(checkpoint, device=GPU, dtype=dtype, max_len=MAX_LEN)
    tokens = sequences(64, seed=1)
    together = {chunk: teacher.logprobs(tokens, chunk) for chunk in (1, 32, MAX_LEN)}
    alone = [teacher.logprobs([ids], 1)[0] for ids in tokens[:4]]
    for logprobs in together.values():
        error = (of_next_tokens(logprobs, tokens) - of_next_tokens(together[MAX_LEN], tokens)).abs()
        assert error.mean() < (2e-2 if dtype == torch.bfloat16 else 1e-5)
    error = (of_next_tokens(alone, tokens[:4]) - of_next_tokens(together[1][:4], tokens[:4])).abs()
    assert error.mean() < (2e-2 if dtype == torch.bfloat16 else 1e-5)


def engine_with(checkpoint: Path, *, graphs: bool) -> LLM:
    return LLM(
        checkpoint, dtype="float32", device="cuda", max_model_len=512, max_num_seqs=16, enable_cuda_graphs=graphs
    )


def capture_all(llm: LLM) -> None:
    """What a worker does in quiet moments."""
    while llm.engine.has_spare_work:
        llm.engine.spare_step()


def captured_prompts(llm: LLM) -> tuple[int, ...]:
    captured = llm.engine._runner.replayed
    return captured.prompts.captured_sizes if captured is not None else ()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 3, "logprobs": 1}],
    ids=["greedy", "drawn"],
)
def test_graphs_change_no_token(checkpoint: Path, sampling: dict[str, Any]) -> None:
    """Batches of every size from 13 down, because the requests end one after another."""
    params = [SamplingParams(max_tokens=8 + 3 * index, ignore_eos=True, **sampling) for index in range(13)]
    prompts = [{"prompt_token_ids": ids} for ids in sequences(13, seed=2)]
    tokens = []
    for graphs in (True, False):
        llm = engine_with(checkpoint, graphs=graphs)
        for _ in range(2):
            tokens.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            capture_all(llm)
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]


@pytest.mark.gpu
def test_captured_prompts_give_the_same_tokens(checkpoint: Path) -> None:
    """Prompts that come alone, of lengths around the captured sizes, and one whose beginning is cached."""
    rng = random.Random(4)
    lengths = (2, 15, 16, 17, 100, 128, 129, 300)
    long = [rng.randrange(3, 320) for _ in range(400)]
    prompts = [[rng.randrange(3, 320) for _ in range(length)] for length in lengths] + [long, [*long[:200], 5, 6, 7]]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    tokens = []
    for graphs in (True, False):
        llm = engine_with(checkpoint, graphs=graphs)
        llm.generate([{"prompt_token_ids": [9] * length} for length in lengths], params)
        for length in (*lengths, 400):
            llm.generate({"prompt_token_ids": [8] * length}, params)
        capture_all(llm)
        outputs = [llm.generate({"prompt_token_ids": prompt}, params)[0] for prompt in prompts]
        assert outputs[-1].num_cached_tokens >= 192
        assert bool(captured_prompts(llm)) == graphs
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]
