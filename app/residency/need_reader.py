"""`NeedReader`: what a model will take, from its files' headers and from what was recorded of its traffic.

Reads in threads; the arithmetic is in `app.residency.arithmetic.demand`.  Called by `app.residency.arranger` before it
places a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from app.residency.advice.acceptance import why_unsupported
from app.residency.arithmetic.demand import Traffic, demand
from app.residency.arithmetic.tenants import DeviceShare, Need
from app.residency.slot import Slot
from app.settings import Settings
from engine.api.errors import UnsupportedModel
from store.facts import ModelFacts

ReadFacts = Callable[[Path], ModelFacts]
ReadTraffic = Callable[[str], Awaitable[Traffic | None]]


class NeedReader:
    """`read_facts` reads files; `read_traffic` knows a model by its name and says None where nothing is recorded."""

    def __init__(self, settings: Settings, read_facts: ReadFacts, read_traffic: ReadTraffic) -> None:
        self._settings = settings
        self._read_facts = read_facts
        self._read_traffic = read_traffic

    async def need_of(self, slot: Slot, devices: Sequence[DeviceShare]) -> Need:
        """Raises `UnsupportedModel`, and the `StoreError` of files that cannot be read."""
        facts = await asyncio.to_thread(self._read_facts, slot.installed.path)
        if reason := why_unsupported(facts):
            raise UnsupportedModel(reason)
        settings = self._settings
        lengths = (settings.max_model_len, slot.wishes.max_model_len, slot.key[1])
        return demand(
            facts,
            devices[0],
            quantization=settings.quantization,
            max_model_len=min((length for length in lengths if length is not None), default=None),
            max_num_seqs=settings.max_num_seqs,
            traffic=await self._read_traffic(slot.installed.name),
        )
