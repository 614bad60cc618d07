"""Engines of random weights for tests on a GPU: a small one in fp32, and one whose memory is worth weighing."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from engine import LLM, SamplingParams
from engine.api.request import Prompt
from engine.loop import EngineLoop
from tests.fakes.checkpoints import VOCAB_SIZE, write_hf_checkpoint, write_tokenizer

MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 16
WIDE_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
"""A granule of 2 MiB holds 32 of their blocks, so that a few hundred blocks come and go with real memory."""


def write_small_model(path: Path) -> None:
    write_hf_checkpoint(path, "llama", **WIDE_HEADS)
    write_tokenizer(path)


def write_large_config(path: Path) -> None:
    """A Llama of 1 GiB in bfloat16, without weights."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)


def small_llm(path: Path, num_kv_blocks: int) -> LLM:
    return LLM(
        path,
        dtype="float32",
        device="cuda",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=256,
        num_kv_blocks=num_kv_blocks,
    )


def prompts(count: int, *, max_tokens: int, longest: int, seed: int = 0) -> list[Prompt]:
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [
        Prompt(
            1000 * (seed + 1) + number,
            tuple(rng.randrange(3, 256) for _ in range(rng.randrange(1, longest))),
            max_tokens,
            sampling,
        )
        for number in range(count)
    ]


def run(engine: EngineLoop, wanted: list[Prompt]) -> dict[int, list[int]]:
    """Submit all and step until all have ended: the tokens of each, by its position."""
    tokens: dict[int, list[int]] = {prompt.sequence_id: [] for prompt in wanted}
    for prompt in wanted:
        engine.submit(prompt)
    while engine.has_work:
        collect(engine, tokens)
    return by_position(wanted, tokens)


def collect(engine: EngineLoop, tokens: dict[int, list[int]]) -> None:
    """One step, whose outputs must be no errors."""
    for output in engine.step():
        assert output.finish_reason in (None, "length"), output.error_message
        tokens[output.sequence_id].extend(output.token_ids)


def by_position(wanted: list[Prompt], tokens: dict[int, list[int]]) -> dict[int, list[int]]:
    return {number: tokens[prompt.sequence_id] for number, prompt in enumerate(wanted)}


def capture_graphs(engine: EngineLoop) -> None:
    while engine.has_spare_work:
        engine.spare_step()


def free_bytes() -> int:
    """Free memory of the GPU, less what torch keeps for nothing; tests that compare it use `alone_on_the_gpu`."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
