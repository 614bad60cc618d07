"""Tokenizers and chat templates against transformers on the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer, Qwen2Tokenizer

from engine.api.request import GenerateRequest
from engine.api.sampling import SamplingParams
from engine.text.chat_template import load_chat_template
from engine.text.gguf_tokenizer import build_gguf_vocabulary
from engine.text.stage import TextStage, open_text_files
from engine.text.tokenizer import load_tokenizer
from tests.fakes.tiny_tokenizers import (
    CHATML,
    byte_level_backend,
    byte_level_metadata,
    sentencepiece_backend,
    sentencepiece_metadata,
    write_directory,
    write_gguf,
)

TEXTS = [
    "hello wo",
    " hello  wo\n\n1234 it's\tDON'T",
    "é€🙂 字 e\u0301 \u200d",
    "<|im_start|>hello<|im_end|><tool> <s>hello</s>",
    "x",
]
MESSAGES = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "hello 🙂"},
    {"role": "assistant", "content": "wo"},
    {"role": "user", "content": "it's"},
]
HEADERS = """
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- bos_token + "# system " + date_string + "\n" + system_message }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if loop.last and message.role != 'user' %}{{ raise_exception("The last one must be the user's") }}{% endif %}
    {{- '# ' ~ message['role'] ~ '\n' + message['content'] | trim + eos_token }}
    {%- if loop.index0 > 100 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '# assistant\n' }}
{%- endif %}
"""
TOOLS = [{"type": "function", "function": {"name": "now", "description": "<time> & date", "parameters": {}}}]
BYTE_LEVEL_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
}
SENTENCEPIECE_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def write(path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> Any:
    """Write a tokenizer's directory and load it with transformers."""
    write_directory(path, backend, tokenizer_config=config)
    return AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
@pytest.mark.parametrize("family", ["byte-level", "sentencepiece"])
def test_directories_give_the_same_ids_and_text(tmp_path: Path, family: str, flags: dict[str, bool]) -> None:
    backend = byte_level_backend() if family == "byte-level" else sentencepiece_backend()
    config = BYTE_LEVEL_CONFIG if family == "byte-level" else SENTENCEPIECE_CONFIG
    oracle = write(tmp_path, backend, {**config, **flags})
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        for add in (True, False):
            token_ids = tokenizer.encode(text, add_special_tokens=add)
            assert token_ids == oracle(text, add_special_tokens=add)["input_ids"]
            for skip in (True, False):
                expected = oracle.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert tokenizer.decode(token_ids, skip_special_tokens=skip) == expected
    assert tokenizer.special_token_ids >= set(oracle.all_special_ids)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (oracle.bos_token_id, (oracle.eos_token_id,))


@pytest.mark.parametrize("source", [CHATML, HEADERS])
@pytest.mark.parametrize("family", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("variables", [{}, {"date_string": "today", "tools": TOOLS}])
def test_chat_prompts_are_the_same_text_and_ids(
    tmp_path: Path, source: str, family: str, variables: dict[str, Any]
) -> None:
    backend = byte_level_backend() if family == "byte-level" else sentencepiece_backend()
    config = BYTE_LEVEL_CONFIG if family == "byte-level" else SENTENCEPIECE_CONFIG
    oracle = write(tmp_path, backend, {**config, "add_bos_token": True, "chat_template": source})
    stage = TextStage(*open_text_files(tmp_path), max_model_len=4096, vocab_size=1000)
    assert stage.chat_template is not None
    for generation_prompt in (True, False):
        options = {"add_generation_prompt": generation_prompt, **variables}
        expected = oracle.apply_chat_template(MESSAGES, tokenize=False, **options)
        assert stage.chat_template.render(MESSAGES, **options) == expected
        request = GenerateRequest(
            request_id="r", sampling=SamplingParams(), messages=tuple(MESSAGES), chat_template_kwargs=options
        )
        (prompt,) = stage.prepare(request, lambda: 1)
        assert list(prompt.token_ids) == oracle.apply_chat_template(MESSAGES, return_dict=False, **options)


def test_a_template_saved_by_transformers_is_found(tmp_path: Path) -> None:
    oracle = write(tmp_path / "..", byte_level_backend(), {**BYTE_LEVEL_CONFIG, "chat_template": CHATML})
    oracle.save_pretrained(tmp_path)
    template = load_chat_template(tmp_path, load_tokenizer(tmp_path))
    assert template is not None
    assert template.render(MESSAGES) == oracle.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    "metadata",
    [
        byte_level_metadata(pre="llama-bpe", add_bos_token=False),
        sentencepiece_metadata(add_bos_token=False),
    ],
    ids=["gpt2", "llama"],
)
def test_gguf_files_give_the_same_ids(tmp_path: Path, metadata: dict[str, Any]) -> None:
    """Except where llama.cpp and transformers differ: the space prefix behind a space or a special token."""
    path = write_gguf(tmp_path / "tiny.gguf", metadata)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    tokenizer = load_tokenizer(path)
    for text in (text for text in TEXTS if not text.startswith(" ") and "<s>" not in text):
        assert tokenizer.encode(text) == oracle(text, add_special_tokens=False)["input_ids"]


def test_qwen2_cuts_words_as_transformers_does() -> None:
    ours = build_gguf_vocabulary(byte_level_metadata(pre="qwen2")).backend
    oracle = Qwen2Tokenizer(vocab={"a": 0, "<|endoftext|>": 1}, merges=[]).backend_tokenizer
    for text in [*TEXTS, "He'LL pay $12,345.67!!\r\n\r\n  (ok)\u00a0\u3000字符 \n\n x"]:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == oracle.pre_tokenizer.pre_tokenize_str(text)
        assert ours.normalizer.normalize_str(text) == oracle.normalizer.normalize_str(text)
