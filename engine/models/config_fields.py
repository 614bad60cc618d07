"""Typed reading of a checkpoint's config dict: every value is checked once, where it enters.

The dict has the keys of Hugging Face's config.json, whether it came from that file or was
translated from GGUF metadata.  Used by the config classes of `engine.models`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.api.errors import BrokenCheckpoint

# Beyond any real model; keeps a corrupt config from asking for absurd sizes.
_MAX_INT = 1 << 26


class ConfigFields:
    """Reads fields of one mapping; an absent or null field takes the default, if it has one.

    All methods raise `BrokenCheckpoint` naming the field.
    """

    def __init__(self, values: Mapping[str, Any], *, within: str = "the model's config") -> None:
        self._values = values
        self._within = within

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = self._present(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not 0 < value <= _MAX_INT:
            raise self._broken(name, f"must be a positive whole number, not {value!r}")
        return value

    def token_id(self, name: str, default: int) -> int:
        value = self._present(name, default)
        if type(value) is not int or not 0 <= value <= _MAX_INT:
            raise self._broken(name, f"must be the id of a token, not {value!r}")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._broken(name, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self._broken(name, f"must be true or false, not {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._present(name, default)
        if not isinstance(value, str):
            raise self._broken(name, f"must be text, not {value!r}")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of texts; empty when absent."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self._broken(name, "must be a list of texts")
        return list(value)

    def section(self, name: str) -> Mapping[str, Any] | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._broken(name, "must be an object")
        return value

    def _present(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self._broken(name, "is missing")
        return value

    def _broken(self, name: str, reason: str) -> BrokenCheckpoint:
        return BrokenCheckpoint(f"{name!r} in {self._within} {reason}; pull the model again or choose another.")
