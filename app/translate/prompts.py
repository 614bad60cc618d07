"""What clients may send as a prompt or an input, as a list of texts and token ids: pure.

Used by `app.translate.openai` and `app.translate.embeddings`.
"""

from __future__ import annotations

from engine.api.errors import InvalidParameter


def split_prompts(given: str | tuple[str | int | tuple[int, ...], ...], param: str) -> list[str | tuple[int, ...]]:
    """A text, a list of texts, a list of token ids, or a list of such lists.  Raises `InvalidParameter`."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidParameter(param, f"{param} must not be empty.")
    token_ids = tuple(item for item in given if isinstance(item, int))
    if len(token_ids) == len(given):
        return [token_ids]
    if token_ids:
        raise InvalidParameter(param, f"{param} mixes token ids with texts or lists; put the ids into a list.")
    return [item for item in given if not isinstance(item, int)]
