"""Refusing by name what a dialect has and this version has not: pure.  Used by the translations of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.api.errors import InvalidParameter


def refuse_unsupported(body: msgspec.Struct, defaults_only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `InvalidParameter` for the first field of `defaults_only` that asks for more than nothing.

    The values are those that ask for nothing, besides None.
    """
    for name in body.__struct_fields__:
        if name in defaults_only and not _asks_for_default(getattr(body, name), defaults_only[name]):
            raise InvalidParameter(name, f"{name} is not supported by this version with that value; leave it out.")


def _asks_for_default(value: Any, accepted: tuple[Any, ...]) -> bool:
    # Types are compared too because 1 == True.
    return value is None or any(value == one and type(value) is type(one) for one in accepted)
