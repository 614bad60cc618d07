"""How one token of a vocabulary turns into bytes of the output text.

Both tokenizer families that the engine serves decode token by token: byte-level BPE spells
each byte as one printable character, SentencePiece writes U+2581 for a space and `<0xNN>` for a
byte.  So text is the concatenation of the tokens' bytes, read as UTF-8, and nothing about a
token depends on its neighbours.  Knows the `decoder` section of tokenizer.json; used by
`engine.text.tokenizer`, which caches the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers

from engine.api.errors import UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenDecoding:
    """`to_bytes` maps a token's spelling to its bytes; `num_stripped_spaces` spaces may go from the start of a text."""

    to_bytes: Callable[[str], bytes]
    num_stripped_spaces: int = 0


def token_decoding(backend: tokenizers.Tokenizer) -> TokenDecoding:
    """Translate the backend's decoder.  Raises UnsupportedModel for one that is not per-token."""
    state = b"null" if backend.decoder is None else backend.decoder.__getstate__()
    decoder: dict[str, Any] = json.loads(state) or {"type": "none"}
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps if step["type"] != "Replace"]
    if kinds == ["ByteLevel"] and len(steps) == 1:
        return TokenDecoding(_byte_level_decoding())
    if kinds in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        no_strip: dict[str, Any] = {"content": " ", "start": 0, "stop": 0}
        strip = steps[-1] if kinds[-1] == "Strip" else no_strip
        replacements = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
        plain = all(isinstance(pattern, str) for pattern, _ in replacements)
        if plain and strip["content"] == " " and strip["stop"] == 0:
            return TokenDecoding(_byte_fallback_decoding(replacements), strip["start"])
    raise UnsupportedModel(
        f"The tokenizer's decoder ({' + '.join(kinds)}) is not supported; use a model with a byte-level BPE or a "
        "SentencePiece BPE tokenizer."
    )


def byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's one printable character per byte (openai/gpt-2, src/encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _byte_level_decoding() -> Callable[[str], bytes]:
    alphabet = byte_level_alphabet()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:
            # An added token that is plain text, such as one with a space or a Chinese character.
            return token.encode()

    return to_bytes


def _byte_fallback_decoding(replacements: list[tuple[str, str]]) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.encode()

    return to_bytes
