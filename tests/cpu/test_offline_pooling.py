"""Decoders behind `LLM.embed` and `LLM.score`: the last token's state, and one of two tokens, as in transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from engine import LLM
from engine.api.errors import InvalidParameter
from engine.api.request import ScoreRequest
from tests.fakes.checkpoints import write_hf_checkpoint, write_tokenizer

PROMPT = "Instruct: Find.\nQuery:"
YES, NO = 40, 50


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def write_steps(directory: Path, *kinds: str, **configs: dict[str, object]) -> None:
    """modules.json, and the config.json of each step that has one."""
    steps = [{"path": f"{index}_{kind}" if index else "", "type": f"s.{kind}"} for index, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(steps))
    for kind, config in configs.items():
        folder = directory / f"{kinds.index(kind)}_{kind}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))


def open_model(path: Path) -> LLM:
    return LLM(path, device="cpu", num_threads=1, max_model_len=512)


def test_an_embedding_decoder(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "qwen3")
    write_tokenizer(tmp_path)
    write_steps(tmp_path, "Transformer", "Pooling", "Normalize", Pooling={"pooling_mode_lasttoken": True})
    general = {"prompts": {"query": PROMPT, "document": ""}, "similarity_fn_name": "cosine"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(general))
    llm, texts = open_model(tmp_path), ["the dog", "the quick brown fox jumps over the lazy dog and then", "a"]
    oracle = transformers.AutoModel.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for prompt, asked in (("", {}), (PROMPT, {"input_type": "query"}), (PROMPT, {"prompt_name": "query"})):
        for text, vector in zip(texts, llm.embed(texts, **asked), strict=True):
            with torch.inference_mode():
                state = oracle(**tokenizer(prompt + text, return_tensors="pt")).last_hidden_state[0, -1].numpy()
            np.testing.assert_allclose(vector, state / np.linalg.norm(state), atol=1e-5)
    (told,) = llm.embed("the dog", instruction="Find.")
    np.testing.assert_allclose(told, llm.embed("the dog", input_type="query")[0], atol=1e-6)
    assert llm.embed("the dog", dimensions=16)[0].shape == (16,)
    with pytest.raises(InvalidParameter, match="call embed"):
        llm.generate("the dog")


def test_a_reranking_decoder(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "qwen3")
    write_tokenizer(tmp_path)
    choices = {"true_token_id": YES, "false_token_id": NO}
    write_steps(tmp_path, "Transformer", "LogitScore", LogitScore=choices)
    llm, pair = open_model(tmp_path), ("the dog", "the lazy fox")
    (score,) = llm.score([pair])
    # What was asked is the stage's business; what the engine makes of it is checked here.
    (prompt,) = llm._pooled.stage.score(ScoreRequest(pairs=(pair,)), lambda: 1)  # type: ignore[union-attr]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt.token_ids])).logits[0, -1]
    assert score == pytest.approx(logits[[YES, NO]].softmax(0)[0].item(), abs=1e-5)
    with pytest.raises(InvalidParameter, match="scores pairs"):
        llm.embed("the dog")
