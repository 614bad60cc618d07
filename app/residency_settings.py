"""The models that the daemon loads at start, and the share of a device's memory that each of them is promised.

They come from `[[resident]]` tables of config.toml, or as `NAME` and `NAME=SHARE` from QUIRE_RESIDENTS and
`quire serve --model`.  Pure values: whether the shares fit the devices is arithmetic on their names, and nothing
here measures, loads or asks the store.  Read by `app.settings`; `app.server` checks the shares before it starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from app.errors import SettingsError
from app.keep_alive import parse_keep_alive
from app.residency.words import memory_name
from engine.api.errors import InvalidParameter
from store.errors import InvalidName
from store.names import parse_model_name

_ROUNDING = 1e-9
"""0.6 + 0.32 is a little more than 0.92 in binary, and yet fits."""


class ResidentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model to load at start; None leaves a choice to the settings of all models, or to the planner.

    `share` is a fraction of its device's memory, `keep_alive` in seconds, `max_model_len` in tokens.
    """

    model: str
    share: float | None = None
    pin: bool = False
    keep_alive: float | None = None
    max_model_len: int | None = None
    device: str | None = None


def read_residents(raw: Any, origin: str) -> tuple[ResidentSettings, ...]:
    """Texts or tables, as a layer of the settings has them.  Raises `SettingsError` that names the entry."""
    if not isinstance(raw, list | tuple):
        raise SettingsError(
            f"resident ({origin}) is not a list of models; write each as a table of its own: [[resident]] and model."
        )
    residents = tuple(
        resident_of_text(entry, origin) if isinstance(entry, str) else _resident_of_table(entry, origin)
        for entry in raw
    )
    names = [parse_model_name(resident.model).text for resident in residents]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise SettingsError(f"{repeated} is named twice among the resident models ({origin}); name it once.")
    return residents


def resident_of_text(text: str, origin: str) -> ResidentSettings:
    """`NAME` or `NAME=SHARE`; the name may hold an equals sign itself, as in `pypi:package==1.0`."""
    name, equals, share = text.strip().rpartition("=")
    if not equals or name.endswith("=") or (not _is_number(share) and _is_model_name(text)):
        return _checked(ResidentSettings(model=text.strip()), origin)
    if not _is_number(share):
        raise SettingsError(f"The share {share!r} of {name} ({origin}) is not a number; write it like {name}=0.5.")
    return _checked(ResidentSettings(model=name, share=float(share)), origin)


def check_shares(
    residents: Iterable[ResidentSettings], *, limit: float, default_share: float | None, devices: Sequence[str]
) -> None:
    """Refuse shares that no placement on `devices` could keep, each of which has `limit` to give.

    Models without a share of their own have `default_share`.  Raises `SettingsError` that shows the sum.
    """
    placed: dict[str, list[tuple[str, float]]] = defaultdict(list)
    everywhere = []
    for resident in residents:
        share = default_share if resident.share is None else resident.share
        if share is None:
            continue
        _check_sum([(resident.model, share)], limit, "one device")
        wish = None if resident.device in (None, "auto") else _ordinal(resident.device)
        if wish is not None:
            placed[wish].append((resident.model, share))
        if wish is None or wish in devices:
            everywhere.append((resident.model, share))
    for device, shares in placed.items():
        _check_sum(shares, limit, memory_name(device))
    # Which of several devices the others go to is the planner's choice; all of them together is what is certain.
    _check_sum(everywhere, limit * len(devices), " and ".join(map(memory_name, devices)))


def _check_sum(shares: Sequence[tuple[str, float]], limit: float, where: str) -> None:
    total = sum(share for _, share in shares)
    if total <= limit + _ROUNDING:
        return
    terms = " + ".join(f"{share:g} ({model})" for model, share in shares)
    sum_shown = f"{terms} = {total:.4g}" if len(shares) > 1 else terms
    raise SettingsError(
        f"The resident models' shares of {where} come to {sum_shown}, above the {limit:g} that memory_limit allows; "
        "lower a share or leave a model out."
    )


def _ordinal(device: str | None) -> str:
    """`cuda` is the first GPU."""
    return "cuda:0" if device == "cuda" else str(device)


def _resident_of_table(table: Any, origin: str) -> ResidentSettings:
    if not isinstance(table, dict):
        raise SettingsError(f"A resident model ({origin}) is neither a name nor a table; write [[resident]] and model.")
    name = table.get("model", "")
    try:
        keep_alive = {"keep_alive": parse_keep_alive(table["keep_alive"])} if "keep_alive" in table else {}
        return _checked(msgspec.convert({**table, **keep_alive}, ResidentSettings), origin)
    except (msgspec.ValidationError, InvalidParameter, TypeError) as error:
        where = f"[[resident]] {name}".strip()
        raise SettingsError(f"{where} ({origin}) is not usable: {_lowered(str(error))}; correct it.") from error


def _checked(resident: ResidentSettings, origin: str) -> ResidentSettings:
    def refuse(reason: str) -> SettingsError:
        name = resident.model or "without a name"
        return SettingsError(f"The resident model {name} ({origin}) is not usable: {reason}.")

    try:
        parse_model_name(resident.model)
    except InvalidName as error:
        raise refuse(_lowered(error.message.rstrip("."))) from error
    if resident.share is not None and not 0.0 < resident.share <= 1.0:
        raise refuse(f"its share is {resident.share:g}; give a fraction above 0 and at most 1")
    if resident.max_model_len is not None and resident.max_model_len < 1:
        raise refuse(f"its max_model_len is {resident.max_model_len}; give at least 1")
    return resident


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_model_name(text: str) -> bool:
    try:
        parse_model_name(text.strip())
    except InvalidName:
        return False
    return True


def _lowered(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:].rstrip(".")
