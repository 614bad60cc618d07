"""Model directories of embedders and rerankers that everything but an engine accepts; they need no torch.

The tokenizer is WordPiece over a handful of words, with BERT's special tokens and token types.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
CLS, SEP = 2, 3
WORDS = ("the", "cat", "dog", "sat", "ran", "far", "away", "search", "for", "passage", ":", "##s", "##ing")
VOCABULARY = {word: token_id for token_id, word in enumerate((*SPECIAL_TOKENS, *WORDS))}
POSITIONS = 64
MAX_LENGTH = 16
WIDTH = 8
PROMPTS = {"query": "search for: ", "passage": "passage: "}


def wordpiece_backend() -> Tokenizer:
    """As BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return tokenizer


def write_tiny_embedder(
    directory: Path, *, prompts: dict[str, str] | None = None, behaviour: dict[str, Any] | None = None
) -> Path:
    """A BertModel with the files of sentence-transformers; `behaviour` is for `tests.fakes.worker`."""
    _write_bert(directory, "BertModel", behaviour)
    steps = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in steps]
    _write_json(directory / "modules.json", modules)
    (directory / "1_Pooling").mkdir(exist_ok=True)
    _write_json(directory / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    _write_json(directory / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH})
    _write_json(directory / "config_sentence_transformers.json", {"prompts": PROMPTS if prompts is None else prompts})
    return directory


def write_tiny_cross_encoder(directory: Path, *, behaviour: dict[str, Any] | None = None) -> Path:
    """A BertForSequenceClassification with one label."""
    return _write_bert(directory, "BertForSequenceClassification", behaviour)


def _write_bert(directory: Path, name: str, behaviour: dict[str, Any] | None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    wordpiece_backend().save(str(directory / "tokenizer.json"))
    config = {
        "architectures": [name],
        "model_type": "bert",
        "hidden_size": WIDTH,
        "hidden_act": "gelu",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": POSITIONS,
        "vocab_size": len(VOCABULARY),
        "id2label": {"0": "LABEL_0"},
        "num_labels": 1,
    }
    _write_json(directory / "config.json", config)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    if behaviour is not None:
        _write_json(directory / "fake_worker.json", behaviour)
    return directory


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
