"""`Tokenizer`: text to token ids and back, the same for Hugging Face directories and GGUF files.

A thin layer over the `tokenizers` library that adds what the library does not know: which
tokens begin and end a sequence, and the bytes of a single token, from which the detokenizer
builds text step by step.  Knows no chat templates and no requests.  Used by
`engine.text.stage`, and by the daemon's tokenize endpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.text.gguf_tokenizer import build_gguf_vocabulary
from engine.text.model_files import read_json_object
from engine.text.token_bytes import token_decoding
from store.formats.gguf_parts import read_gguf_metadata


class Tokenizer:
    """One model's tokenizer; safe to share between threads.

    `eos_token_ids` are all tokens that end an answer; `bos_token` and `eos_token` are the
    spellings that chat templates write, "" where the model has none.  Token ids outside the
    vocabulary decode to nothing, since models may pad their output layer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        decoding = token_decoding(backend)
        self._backend = backend
        self._to_bytes = decoding.to_bytes
        self._bytes_by_id: dict[int, bytes] = {}
        self._whole_text_by_id: dict[int, str | None] = {}
        self.num_stripped_spaces = decoding.num_stripped_spaces
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token = self._spelling(bos_token_id)
        self.eos_token = self._spelling(eos_token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens spelled out in it become single ids."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, with U+FFFD for bytes that are not UTF-8.

        Equal to the `tokenizers` library, save that a run of byte-fallback tokens with one bad
        byte keeps its good characters, so that text can be given out as it grows.
        """
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        parts = [self.token_bytes(token_id) for token_id in token_ids if token_id not in hidden]
        text = b"".join(parts).decode("utf-8", "replace")
        num_spaces = len(text) - len(text.lstrip(" "))
        return text[min(num_spaces, self.num_stripped_spaces) :]

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to the text, before any UTF-8 decoding."""
        cached = self._bytes_by_id.get(token_id)
        if cached is None:
            cached = self._to_bytes(self._spelling(token_id))
            self._bytes_by_id[token_id] = cached
        return cached

    def whole_text(self, token_id: int) -> str | None:
        """Return one token as text, None where its bytes are not whole characters."""
        try:
            return self._whole_text_by_id[token_id]
        except KeyError:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            return self._whole_text_by_id.setdefault(token_id, text)

    def token_text(self, token_id: int) -> str:
        r"""Return one token as text; bytes that are no whole character are written as \xNN."""
        return self.token_bytes(token_id).decode("utf-8", "backslashreplace")

    def _spelling(self, token_id: int | None) -> str:
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""


def load_tokenizer(model: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory or a GGUF file.

    What `encode` adds around a text is what tokenizer.json says, as in transformers 5; the
    `add_bos_token` of tokenizer_config.json is for tokenizers that have no tokenizer.json.
    Raises UnsupportedModel for a directory without tokenizer.json or a kind of tokenizer that
    is not implemented, BrokenCheckpoint for files that contradict themselves, and
    `store.errors.BrokenFile` for a damaged GGUF file.
    """
    if model.is_dir():
        return _load_directory(model)
    return gguf_tokenizer(read_gguf_metadata(model))


def load_backend(model: Path) -> tokenizers.Tokenizer:
    """The library's own tokenizer of a checkpoint directory or a GGUF file, of any kind; errors as `load_tokenizer`.

    It neither cuts nor pads, whatever the file says.
    """
    if model.is_dir():
        return _read_directory(model)
    return build_gguf_vocabulary(read_gguf_metadata(model)).backend


def empty_tokenizer() -> Tokenizer:
    """Return a tokenizer without a vocabulary, for a config that came alone: no text has ids, no id has text."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that the metadata of a GGUF file describes; errors as `load_tokenizer`."""
    vocabulary = build_gguf_vocabulary(metadata)
    return Tokenizer(
        vocabulary.backend,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_id=vocabulary.eos_token_id,
        eos_token_ids=vocabulary.eos_token_ids,
    )


class _AddedTokenEntry(msgspec.Struct, frozen=True):
    """One value of `added_tokens_decoder`; further keys are ignored."""

    content: str
    special: bool = False
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


def _read_directory(model: Path) -> tokenizers.Tokenizer:
    path = model / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(
            f"{model.name} has no tokenizer.json; add one with transformers "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...)) or pull a repository that has it."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise BrokenCheckpoint(f"tokenizer.json cannot be read ({error}); pull the model again.") from error
    backend.no_truncation()
    backend.no_padding()
    _add_configured_tokens(backend, read_json_object(model / "tokenizer_config.json").get("added_tokens_decoder", {}))
    return backend


def _load_directory(model: Path) -> Tokenizer:
    backend = _read_directory(model)
    config = read_json_object(model / "tokenizer_config.json")
    model_config = read_json_object(model / "config.json")
    bos = _named_token_id(backend, config, "bos_token")
    eos = _named_token_id(backend, config, "eos_token")
    if not config:
        bos = next(iter(_token_ids(model_config.get("bos_token_id"))), None)
        eos = next(iter(_token_ids(model_config.get("eos_token_id"))), None)
    _mark_special(backend, bos, eos)
    ends = _token_ids(read_json_object(model / "generation_config.json").get("eos_token_id"))
    if not ends:
        ends = [*([] if eos is None else [eos]), *_token_ids(model_config.get("eos_token_id"))]
    return Tokenizer(backend, bos_token_id=bos, eos_token_id=eos, eos_token_ids=tuple(dict.fromkeys(ends)))


def _add_configured_tokens(backend: tokenizers.Tokenizer, entries: object) -> None:
    """Apply the added tokens of tokenizer_config.json that tokenizer.json does not already mark."""
    try:
        configured = msgspec.convert(entries, dict[int, _AddedTokenEntry], str_keys=True)
    except msgspec.ValidationError as error:
        raise BrokenCheckpoint(
            f"added_tokens_decoder of tokenizer_config.json is malformed ({error}); pull the model again."
        ) from error
    known = backend.get_added_tokens_decoder()
    for token_id, entry in sorted(configured.items()):
        in_backend = known.get(token_id)
        if in_backend is None or (entry.special and not in_backend.special):
            token = AddedToken(**msgspec.structs.asdict(entry))
            backend.add_special_tokens([token]) if entry.special else backend.add_tokens([token])


def _mark_special(backend: tokenizers.Tokenizer, *token_ids: int | None) -> None:
    """Make tokens special that tokenizer_config.json names as such, where tokenizer.json has them as plain words."""
    known = backend.get_added_tokens_decoder()
    for token_id in token_ids:
        token = None if token_id is None or token_id in known else backend.id_to_token(token_id)
        if token is not None:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])


def _named_token_id(backend: tokenizers.Tokenizer, config: dict[str, Any], name: str) -> int | None:
    token = config.get(name)
    spelling = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(spelling) if isinstance(spelling, str) else None


def _token_ids(value: object) -> list[int]:
    """Read a config field that is one id, a list of ids, or absent."""
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if isinstance(token_id, int) and not isinstance(token_id, bool)]
