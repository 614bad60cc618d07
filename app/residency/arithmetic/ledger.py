"""`Ledger`: the only account of what was promised to whom, on every device.

Each model that has a worker has one entry, from before it starts until it is gone, whether it is touched yet or
not.  Small, mutable, used from one thread; owned by `app.residency.supervisor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from app.residency.arithmetic.tenants import DeviceShare
from store.space import format_bytes


class Overdrawn(Exception):
    """A promise that the device cannot keep, or a name that has or lacks an entry: a mistake of the caller."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one model holds of its device."""

    name: str
    device: str
    held_bytes: int


class Ledger:
    """Bytes by model; every change either keeps each device within its limit or raises `Overdrawn`, changing nothing.

    What other programs take after a promise was made breaks no promise: `check` measures against the limit alone,
    `reserve` and `resize` against what is usable at that moment.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def held_bytes(self, device: str) -> int:
        """The sum of what models hold of a device."""
        return sum(entry.held_bytes for entry in self._entries.values() if entry.device == device)

    def held_by(self, name: str) -> int:
        """What one model holds; 0 without an entry."""
        return self._entries[name].held_bytes if name in self._entries else 0

    def free_bytes(self, device: DeviceShare) -> int:
        """What is promised to nobody; negative where other programs have taken what was."""
        return device.limit_bytes - device.others_bytes - self.held_bytes(device.name)

    def reserve(self, name: str, device: DeviceShare, held_bytes: int) -> None:
        """Open an entry for a model that is about to be loaded."""
        if name in self._entries:
            raise Overdrawn(f"{name} already has an entry of {format_bytes(self._entries[name].held_bytes)}.")
        self._require(name, device, held_bytes)
        self._entries[name] = Entry(name, device.name, held_bytes)

    def resize(self, name: str, device: DeviceShare, held_bytes: int) -> None:
        """Change what a model that is awake holds; one that shrinks may stay beyond what is usable by now."""
        entry = self._entry(name, device)
        if held_bytes < 0 or held_bytes > entry.held_bytes:
            self._require(name, device, held_bytes - entry.held_bytes)
        self._entries[name] = replace(entry, held_bytes=held_bytes)

    def correct(self, name: str, held_bytes: int) -> None:
        """Note what a worker says it really holds; beyond the promise it shows in `check` where the device is full."""
        entry = self._entry(name)
        self._entries[name] = replace(entry, held_bytes=max(0, held_bytes))

    def sleep(self, name: str, held_bytes: int) -> None:
        """The model has given back all but `held_bytes`; waking is `resize`."""
        entry = self._entry(name)
        if not 0 <= held_bytes <= entry.held_bytes:
            raise Overdrawn(
                f"{name} would hold {format_bytes(held_bytes)} asleep and {format_bytes(entry.held_bytes)} awake."
            )
        self._entries[name] = replace(entry, held_bytes=held_bytes)

    def release(self, name: str) -> None:
        """Close the entry of a model whose worker is gone."""
        self._entry(name)
        del self._entries[name]

    def check(self, devices: Iterable[DeviceShare]) -> None:
        """Raise `Overdrawn` unless what all models hold is within the limit of each device."""
        by_name = {device.name: device for device in devices}
        for entry in self._entries.values():
            if entry.device not in by_name:
                raise Overdrawn(f"{entry.name} is on {entry.device}, which is not there.")
            if entry.held_bytes < 0:
                raise Overdrawn(f"{entry.name} holds less than nothing.")
        for device in by_name.values():
            held = self.held_bytes(device.name)
            if held > device.limit_bytes:
                raise Overdrawn(
                    f"Models hold {format_bytes(held)} of {device.name}, whose limit is "
                    f"{format_bytes(device.limit_bytes)}."
                )

    def _entry(self, name: str, device: DeviceShare | None = None) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise Overdrawn(f"{name} has no entry.")
        if device is not None and device.name != entry.device:
            raise Overdrawn(f"{name} is on {entry.device}, not on {device.name}.")
        return entry

    def _require(self, name: str, device: DeviceShare, more_bytes: int) -> None:
        if more_bytes < 0:
            raise Overdrawn(f"{name} cannot hold less than nothing.")
        free = self.free_bytes(device)
        if more_bytes > free:
            raise Overdrawn(
                f"{name} would take {format_bytes(more_bytes)} of {device.name}, where {format_bytes(max(0, free))} "
                "are free."
            )
