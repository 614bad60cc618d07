"""The starter model against transformers on the same weights, dequantised by transformers' own GGUF reader."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.api.config import Quantization
from engine.text.tokenizer import load_tokenizer
from store.models import InstalledModel

NUM_TEACHER_FORCED_TOKENS = 200
TEXT = """The paged engine keeps keys and values in blocks of sixteen tokens. A block belongs to one
sequence or is shared by several whose prompts begin alike, and it returns to the pool when the last of
them has ended. Because blocks need not be neighbours, memory is never fragmented: a long conversation
takes as many blocks as it has tokens, divided by sixteen and rounded up, and not one more. When the
pool runs dry, the youngest sequence gives its blocks back and is computed again later. Nobody notices
except the clock. In the evening the lighthouse keeper climbed the stairs, counted the steps as he had
done for thirty years, and lit the lamp. Far out, a ship answered with two short flashes. He wrote the
hour into his book, poured himself a cup of tea, and waited for the storm that the radio had promised.
It came at midnight, from the north, and by two o'clock nobody could have said where the sea ended."""


@pytest.fixture(scope="module")
def token_ids(starter: InstalledModel) -> list[int]:
    token_ids = load_tokenizer(starter.path).encode(TEXT)[: NUM_TEACHER_FORCED_TOKENS + 1]
    assert len(token_ids) == NUM_TEACHER_FORCED_TOKENS + 1
    return token_ids


@pytest.fixture(scope="module")
def expected(starter: InstalledModel, token_ids: list[int]) -> list[int]:
    """The most likely next token after each of the 200 prefixes, by transformers in fp32."""
    model = AutoModelForCausalLM.from_pretrained(
        starter.path.parent, gguf_file=starter.path.name, dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0]
    return logits.argmax(-1)[:NUM_TEACHER_FORCED_TOKENS].tolist()


@pytest.mark.parametrize(("quantization", "least"), [("none", 0.99), ("auto", 0.94)])
def test_teacher_forced_tokens_agree(
    starter: InstalledModel, token_ids: list[int], expected: list[int], quantization: Quantization, least: float
):
    """Each prefix is a request of its own; all but its last block comes from the prefix cache.

    Eight bits of activations change the likeliest of two tokens that are nearly equally likely, as one in 25 is.
    """
    llm = LLM(starter.path, device="cpu", max_model_len=512, max_num_seqs=8, quantization=quantization)
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate({"prompt_token_ids": token_ids}, one_token)
    prefixes = [{"prompt_token_ids": token_ids[:length]} for length in range(1, NUM_TEACHER_FORCED_TOKENS + 1)]
    outputs = llm.generate(prefixes, one_token)
    predicted = [output.outputs[0].token_ids[0] for output in outputs]
    agreement = sum(a == b for a, b in zip(predicted, expected, strict=True)) / NUM_TEACHER_FORCED_TOKENS
    assert agreement >= least, f"{agreement:.1%} of {NUM_TEACHER_FORCED_TOKENS} tokens agree"


def test_it_knows_the_capital_of_france(starter: InstalledModel):
    llm = LLM(starter.path, device="cpu", max_model_len=512)
    messages = [{"role": "user", "content": "What is the capital of France, and what is it famous for?"}]
    output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=20))[0]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason in ("stop", "length")
