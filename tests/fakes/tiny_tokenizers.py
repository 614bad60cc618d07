"""Complete tokenizers of a few hundred tokens, in memory, as a directory and as a GGUF header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from gguf import GGUFWriter
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from engine.text.token_bytes import byte_level_alphabet

SPACE = "\u2581"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level_vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Control tokens, one token per byte, then a few merges: of words, and of halves of characters."""
    characters = {byte: character for character, byte in byte_level_alphabet().items()}
    emoji = [characters[byte] for byte in "🙂".encode()]
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        (characters[0x20], "w"),
        (characters[0x20] + "w", "o"),
        ("'", "s"),
        ("1", "2"),
        (emoji[0], emoji[1]),
        (emoji[2], emoji[3]),
    ]
    tokens = [*CONTROL_TOKENS, *(characters[byte] for byte in range(256)), *(left + right for left, right in merges)]
    return tokens, merges


def byte_level_backend() -> tokenizers.Tokenizer:
    """GPT-2's pipeline; the last token, <tool>, is added but not special."""
    tokens, merges = byte_level_vocabulary()
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


def sentencepiece_vocabulary() -> tuple[list[str], list[int], list[float]]:
    """Tokens, GGUF token types and scores of a SentencePiece BPE with byte fallback."""
    merged = [SPACE + "w", "he", "ll", "hell", "hello", SPACE + "hello", SPACE + "wo", SPACE + SPACE]
    single = [SPACE, *"abcdefghijklmnopqrstuvwxyz.,!'12é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *single]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(merged) + len(single))]
    scores = [0.0] * 259 + [float(-rank) for rank in range(len(merged) + len(single))]
    return tokens, types, scores


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """The pipeline that transformers gives Llama 2."""
    tokens, _, _ = sentencepiece_vocabulary()
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [(SPACE, "w"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), (SPACE, "hello"), (SPACE + "w", "o")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[*merges, (SPACE, SPACE)], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    return backend


def write_directory(path: Path, backend: tokenizers.Tokenizer, **files: dict[str, Any]) -> Path:
    """Write tokenizer.json, and each keyword as NAME.json."""
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def write_gguf(path: Path, metadata: dict[str, Any], *, architecture: str = "llama") -> Path:
    """Write a GGUF file with this metadata (strings, bools, numbers, lists of one kind) and no tensors."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_metadata(**overrides: Any) -> dict[str, Any]:
    """GGUF metadata of the byte-level vocabulary; keywords replace `tokenizer.ggml.*`, None removes one."""
    tokens, merges = byte_level_vocabulary()
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [CONTROL] * len(CONTROL_TOKENS) + [NORMAL] * (len(tokens) - len(CONTROL_TOKENS)),
        "merges": [f"{left} {right}" for left, right in merges],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return _metadata({**fields, **overrides})


def sentencepiece_metadata(**overrides: Any) -> dict[str, Any]:
    """GGUF metadata of the SentencePiece vocabulary; keywords as in `byte_level_metadata`."""
    tokens, types, scores = sentencepiece_vocabulary()
    fields = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return _metadata({**fields, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **overrides})


def _metadata(fields: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}
