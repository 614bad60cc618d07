"""`EncoderConfig`: the shape of a BERT-like encoder, read from a checkpoint's config dict.

What differs between the families is passed in by the family's own file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from engine.api.architectures import unsupported_activation, unsupported_labels, unsupported_quantization
from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.models.config_fields import ConfigFields

HeadKind = Literal["pooler", "dense"]
_MAX_LAYERS = 1024


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ABC):
    """Sizes in elements, lengths in tokens; `dtype` is the checkpoint's own, "" when it names none.

    A text's first token is at row `first_position` of the position table of `num_position_rows`.  `head` is the
    kind of a cross-encoder's classification head, None for models without one.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_position_rows: int
    first_position: int
    num_types: int
    layer_norm_eps: float
    head: HeadKind | None
    dtype: str

    @classmethod
    @abstractmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json's keys.  Raises `UnsupportedModel` or `BrokenCheckpoint`."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def max_position_embeddings(self) -> int:
        """The longest text."""
        return self.num_position_rows - self.first_position

    @classmethod
    def _read(cls, config: Mapping[str, Any], *, first_position: int, head: HeadKind) -> Self:
        fields = ConfigFields(config)
        is_classifier = any(name.endswith("ForSequenceClassification") for name in fields.texts("architectures"))
        _refuse_unsupported(fields, is_classifier=is_classifier)
        hidden_size, num_heads = fields.positive_int("hidden_size"), fields.positive_int("num_attention_heads")
        num_layers = fields.positive_int("num_hidden_layers")
        num_position_rows = fields.positive_int("max_position_embeddings", 512)
        if hidden_size % num_heads or num_layers > _MAX_LAYERS or num_position_rows <= first_position:
            raise BrokenCheckpoint(
                f"The model's config has a hidden size of {hidden_size}, {num_heads} heads, {num_layers} layers and "
                f"{num_position_rows} positions, which do not fit together; pull the model again or choose another."
            )
        return cls(
            architecture=fields.text("model_type", ""),
            vocab_size=fields.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive_int("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_position_rows=num_position_rows,
            first_position=first_position,
            num_types=fields.positive_int("type_vocab_size", 2),
            layer_norm_eps=fields.positive_float("layer_norm_eps", 1e-12),
            head=head if is_classifier else None,
            dtype=fields.text("dtype", fields.text("torch_dtype", "")),
        )


def _refuse_unsupported(fields: ConfigFields, *, is_classifier: bool) -> None:
    labels = fields.section("id2label")
    num_labels = len(labels) if labels is not None else fields.positive_int("num_labels", 2)
    positions = fields.text("position_embedding_type", "absolute")
    for reason in (
        unsupported_activation(fields.text("hidden_act", "gelu"), fields.get("model_type")),
        unsupported_quantization(is_quantized=bool(fields.section("quantization_config"))),
        unsupported_labels(num_labels) if is_classifier else None,
        None
        if positions == "absolute"
        else f"Positions of type {positions!r} are not supported; choose another model.",
        "A decoder of this type is not supported; choose an encoder." if fields.flag("is_decoder", False) else None,
    ):
        if reason:
            raise UnsupportedModel(reason)
