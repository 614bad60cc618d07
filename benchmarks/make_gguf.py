"""A GGUF file of a given shape with random weights, to measure speed on: what the weights say does not matter there.

    python benchmarks/make_gguf.py --shape llama-1b --type Q4_1 [--tokenizer-from FILE.gguf] OUT.gguf

Both Quire and llama.cpp load it.  Matrices are drawn row by row from a pool of quantised random rows, so a
file of gigabytes takes seconds.  Embedding and head of 4-bit files have 8 bits, as converters like to keep
them.  The tokenizer is copied from `--tokenizer-from` and padded with unused
tokens, or else has one token per byte.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize

POOL_ROWS = 1024
"""Different rows of each width; more would change no timing."""
FILE_TYPES = {
    "F16": LlamaFileType.MOSTLY_F16,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}
_TOKENIZER_PREFIX = "tokenizer."
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's dimensions; `architecture` is GGUF's name of its family."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = True
    context_length: int = 8192
    rope_theta: float = 500_000.0


SHAPES = {
    "tiny": Shape("llama", 2, 64, 128, 4, 2, 16, 320, context_length=256),
    "llama-135m": Shape("llama", 30, 576, 1536, 9, 3, 64, 49_152),
    "llama-0.5b": Shape("llama", 24, 1024, 4096, 16, 4, 64, 65_536),
    "llama-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128_256),
    "qwen2-0.5b": Shape("qwen2", 24, 896, 4864, 14, 2, 64, 151_936),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151_936),
}


class Matrices:
    """Quantised random matrices, made of the rows of one pool per width."""

    def __init__(self, quantization: GGMLQuantizationType, seed: int) -> None:
        self._quantization = quantization
        self._random = np.random.default_rng(seed)
        self._pools: dict[int, np.ndarray] = {}

    def draw(self, num_rows: int, width: int) -> np.ndarray:
        """[num_rows, width] as the bytes of its blocks; entries of variance 1 / width keep activations in bounds."""
        if width not in self._pools:
            rows = self._random.standard_normal((POOL_ROWS, width), np.float32) / np.float32(width**0.5)
            self._pools[width] = quantize(rows, self._quantization)
        return self._pools[width][self._random.integers(POOL_ROWS, size=num_rows)]


def write(path: Path, shape: Shape, type_name: str, tokenizer_from: Path | None, seed: int = 0) -> None:
    """Write the file.  Raises `ValueError` when the tokenizer has more tokens than the shape has."""
    writer = GGUFWriter(path, shape.architecture)
    _add_fields(writer, shape)
    writer.add_file_type(FILE_TYPES[type_name])
    if tokenizer_from is None:
        _add_byte_tokenizer(writer, shape.vocab_size)
    else:
        _copy_tokenizer(writer, GGUFReader(tokenizer_from), shape.vocab_size)
    _add_tensors(writer, shape, GGMLQuantizationType[type_name], seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_fields(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_name(f"random {shape.architecture}")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab_size)


def _add_tensors(writer: GGUFWriter, shape: Shape, quantization: GGMLQuantizationType, seed: int) -> None:
    finer = GGMLQuantizationType.Q8_0 if quantization.name.startswith("Q4") else quantization
    pools = {kind: Matrices(kind, seed) for kind in {quantization, finer}}
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def matrix(name: str, num_rows: int, width: int, kind: GGMLQuantizationType = quantization) -> None:
        writer.add_tensor(f"{name}.weight", pools[kind].draw(num_rows, width), raw_dtype=kind)

    def vector(name: str, values: np.ndarray) -> None:
        writer.add_tensor(name, values.astype(np.float32))

    matrix("token_embd", shape.vocab_size, hidden, finer)
    for layer in range(shape.num_layers):
        block = f"blk.{layer}"
        vector(f"{block}.attn_norm.weight", np.ones(hidden))
        matrix(f"{block}.attn_q", queries, hidden)
        matrix(f"{block}.attn_k", keys, hidden)
        matrix(f"{block}.attn_v", keys, hidden)
        matrix(f"{block}.attn_output", hidden, queries)
        if shape.architecture == "qwen2":
            for name, size in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
                vector(f"{block}.{name}.bias", np.zeros(size))
        if shape.architecture == "qwen3":
            vector(f"{block}.attn_q_norm.weight", np.ones(shape.head_dim))
            vector(f"{block}.attn_k_norm.weight", np.ones(shape.head_dim))
        vector(f"{block}.ffn_norm.weight", np.ones(hidden))
        matrix(f"{block}.ffn_gate", intermediate, hidden)
        matrix(f"{block}.ffn_up", intermediate, hidden)
        matrix(f"{block}.ffn_down", hidden, intermediate)
    vector("output_norm.weight", np.ones(hidden))
    if not shape.tied:
        matrix("output", shape.vocab_size, hidden, finer)


def _copy_tokenizer(writer: GGUFWriter, reader: GGUFReader, vocab_size: int) -> None:
    for key, field in reader.fields.items():
        if key.startswith(_TOKENIZER_PREFIX):
            kinds = field.types
            value = field.contents()
            if key.endswith((".tokens", ".token_type", ".scores")):
                value = _padded(key.rpartition(".")[2], value, vocab_size)
            writer.add_key_value(key, value, kinds[0], kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None)


def _padded(kind: str, values: list[Any], vocab_size: int) -> list[Any]:
    if len(values) > vocab_size:
        raise ValueError(f"the tokenizer has {len(values):,} tokens, more than the shape's {vocab_size:,}")
    padding = {"token_type": int(TokenType.UNUSED), "scores": 0.0}
    return values + [padding.get(kind, f"<unused_{index}>") for index in range(len(values), vocab_size)]


def _add_byte_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """Byte-level BPE with a single merge, which llama.cpp asks for."""
    tokens = ["<|end|>", *map(byte_symbol, range(256)), "ab"]
    types = [int(TokenType.CONTROL)] + [int(TokenType.NORMAL)] * 257
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_padded("tokens", tokens, vocab_size))
    writer.add_token_types(_padded("token_type", types, vocab_size))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def byte_symbol(byte: int) -> str:
    """The character that stands for a byte in byte-level BPE: itself if printable, else the next above 255.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py, `bytes_to_unicode`.
    """
    if byte in _PRINTABLE:
        return chr(byte)
    return chr(256 + sum(other not in _PRINTABLE for other in range(byte)))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A GGUF file of a given shape with random weights.")
    parser.add_argument("--shape", required=True, choices=sorted(SHAPES))
    parser.add_argument("--type", default="Q4_1", choices=sorted(FILE_TYPES))
    parser.add_argument("--tokenizer-from", type=Path, help="a GGUF file; else one token per byte")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("output", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    write(arguments.output, SHAPES[arguments.shape], arguments.type, arguments.tokenizer_from, arguments.seed)
    size_bytes = arguments.output.stat().st_size
    print(json.dumps({"shape": arguments.shape, "type": arguments.type, "size_bytes": size_bytes}))


if __name__ == "__main__":
    main()
