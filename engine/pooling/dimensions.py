"""How far a vector may be cut: the rule, and its sentence, for the text stage and for engines alike."""

from __future__ import annotations

from engine.api.errors import InvalidParameter


def check_dimensions(dimensions: int | None, embedding_length: int) -> None:
    """Raises `InvalidParameter` unless a vector of `embedding_length` has so many components; None means all."""
    if dimensions is not None and not 1 <= dimensions <= embedding_length:
        raise InvalidParameter(
            "dimensions",
            f"dimensions is {dimensions:,}, and the model's vectors have {embedding_length:,}; give 1 to "
            f"{embedding_length:,}, or leave it out.",
        )
