"""Build a tokenizer from the metadata of a GGUF file.

A GGUF file holds the vocabulary, the merges or scores and the *name* of a pre-tokenizer, not
a tokenizer.json, so the pipeline around the vocabulary is put together here.  Knows the
`tokenizer.*` keys and how llama.cpp, which defines them, reads them; knows nothing of files,
tensors or chat templates' meaning.  Called by `engine.text.tokenizer`.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (section Tokenizer)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from store.formats.gguf_strings import GgufStrings

SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Tokens that end an assistant's turn; files often name only one of a model's several in their metadata.
_TURN_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One value of `tokenizer.ggml.pre`: the text is split by each pattern in turn.

    `add_bos` is what holds where the file does not say; `ignore_merges` takes a word that is
    in the vocabulary whole.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    normalize_nfc: bool = False


_LLAMA3 = PreTokenizer((rf"{_WORDS}|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}",), ignore_merges=True, add_bos=True)
_QWEN2_PATTERN = rf"{_WORDS}|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,)),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": PreTokenizer((_QWEN2_PATTERN,), normalize_nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2_PATTERN,)),
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """What the metadata yields; the ids are checked against the vocabulary."""

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def build_gguf_vocabulary(metadata: Mapping[str, Any]) -> GgufVocabulary:
    """Return the tokenizer that `tokenizer.ggml.*` describes.

    Raises UnsupportedModel for a tokenizer model or pre-tokenizer that is not known, and
    BrokenCheckpoint where the keys are missing or contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = list(_array_of(metadata, "tokens", str))
    types = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = list(_array_of(metadata, "token_type", int))
    if len(types) != len(tokens):
        raise _broken(f"has {len(tokens)} tokens but {len(types)} token types")
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata, tokens)
        default_bos, default_eos = None, None
    elif kind == "llama":
        backend, add_bos = _sentencepiece_bpe(metadata, tokens, types), True
        default_bos, default_eos = 1, 2
    else:
        raise UnsupportedModel(
            f"The GGUF tokenizer model {kind!r} is not supported; use a GGUF file whose tokenizer.ggml.model is "
            "'gpt2' or 'llama'."
        )
    _mark_added_tokens(backend, tokens, types)
    bos = _token_id(metadata, "bos", len(tokens), default_bos)
    eos = _token_id(metadata, "eos", len(tokens), default_eos)
    before = [bos] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", add_bos) else []
    after = [eos] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*(tokens[token_id] for token_id in before), "$A", *(tokens[token_id] for token_id in after)],
        special_tokens=[(tokens[token_id], token_id) for token_id in dict.fromkeys([*before, *after])],
    )
    named = (eos, *(_token_id(metadata, key, len(tokens), None) for key in ("eot", "eom")))
    turn_ends = _turn_end_ids(metadata.get("tokenizer.chat_template"), tokens, types)
    ends = dict.fromkeys(token_id for token_id in (*named, *turn_ends) if token_id is not None)
    return GgufVocabulary(backend=backend, bos_token_id=bos, eos_token_id=eos, eos_token_ids=tuple(ends))


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UnsupportedModel(
            f"The GGUF pre-tokenizer {name!r} is not supported; use a file with one of "
            f"{', '.join(sorted(PRE_TOKENIZERS))}."
        )
    merges = _array_of(metadata, "merges", str)
    backend = _bpe(tokens, _Pairs(len(merges), lambda: map(_split_merge, merges)), ignore_merges=pre.ignore_merges)
    if pre.normalize_nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    scores = list(_array_of(metadata, "scores", int | float))
    if len(scores) != len(tokens):
        raise _broken(f"has {len(tokens)} tokens but {len(scores)} scores")
    unknown = _token_id(metadata, "unknown", len(tokens), 0)
    merges = _merges_from_scores(tokens, types, scores)
    pairs = _Pairs(len(merges), lambda: ((tokens[left], tokens[right]) for _, left, right in merges))
    backend = _bpe(
        tokens, pairs, byte_fallback=True, fuse_unk=True, unk_token=None if unknown is None else tokens[unknown]
    )
    escape = normalizers.Replace(" ", SPACE)
    unescape = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape])
        backend.decoder = decoders.Sequence([*unescape, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = escape
        backend.decoder = decoders.Sequence(unescape)
    return backend


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[float, int, int]]:
    """Recover the merges of a SentencePiece BPE: any two pieces that join to a third, best score first.

    Each is the negated score of the third and the ids of the two.
    """
    pieces = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] == _NORMAL}
    ranked: list[tuple[float, int, int]] = []
    for token, token_id in pieces.items():
        for cut in range(1, len(token)):
            left_id = pieces.get(token[:cut])
            right_id = None if left_id is None else pieces.get(token[cut:])
            if left_id is not None and right_id is not None:
                ranked.append((-scores[token_id], left_id, right_id))
    ranked.sort()
    return ranked


class _Pairs(Sequence[tuple[str, str]]):
    """The merges as the library takes them, each pair made when it is read.

    As one list, the pairs of a vocabulary would take more memory than the finished tokenizer.
    """

    def __init__(self, count: int, pairs: Callable[[], Iterator[tuple[str, str]]]) -> None:
        self._count = count
        self._pairs = pairs

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self._pairs()

    def __getitem__(self, index: Any) -> Any:
        # Only for the library to see a sequence, which it then iterates.
        return list(self)[index]


def _bpe(tokens: list[str], merges: _Pairs, **options: Any) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception for bad vocabularies
        for _ in merges:  # it also swallows what `merges` raises
            pass
        raise _broken(f"does not form a BPE model ({error})") from error


def _mark_added_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Keep control and user-defined tokens whole when they occur in a text."""
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    plain = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])


def _turn_end_ids(template: object, tokens: list[str], types: list[int]) -> list[int]:
    """Return the ids of well-known end-of-turn control tokens that the chat template writes."""
    if not isinstance(template, str):
        return []
    used = {token for token in _TURN_END_TOKENS if token in template}
    return [token_id for token_id, token in enumerate(tokens) if token in used and types[token_id] == _CONTROL]


def _split_merge(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if left and space:
        return left, right
    # A token may itself begin with a space, so the first character never separates.
    left, space, right = merge[1:].partition(" ")
    if not space:
        raise _broken(f"has the merge {merge!r} without a second part")
    return merge[0] + left, right


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int, default: int | None) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
        raise _broken(f"has the {name} token id {token_id!r} outside its {num_tokens} tokens")
    return token_id


def _array_of(metadata: Mapping[str, Any], name: str, kind: Any) -> Collection[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if kind is str and isinstance(values, GgufStrings):
        return values
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise _broken(f"has no usable list {name!r}")
    return values


def _broken(reason: str) -> BrokenCheckpoint:
    return BrokenCheckpoint(f"The tokenizer in the GGUF file {reason}; pull the model again or use another file.")
