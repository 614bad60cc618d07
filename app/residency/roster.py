"""`Roster`: the slots of all models that are in memory, asked for, or to be remembered, and who answers for a name.

Names and aliases are looked up in the store once, and again only when their model is not there.  Used by the
supervisor, on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.errors import ModelNotLoaded
from app.model_task import require_task, task_of
from app.residency.model_loader import WorkerKey, worker_key
from app.residency.slot import Slot, Told
from app.residency.wishes import Wishes
from app.settings import Settings
from engine.api.wire import Task
from store.models import InstalledModel


class Roster:
    """`slots` has one for each worker that there is or is to be; the parts of the supervisor read it."""

    def __init__(self, settings: Settings, find_model: Callable[[str], InstalledModel]) -> None:
        self.slots: dict[WorkerKey, Slot] = {}
        self._settings = settings
        self._find_model = find_model
        self._installed: dict[str, InstalledModel] = {}

    async def slot_of(self, name: str, told: Told, tasks: tuple[Task, ...] = ()) -> tuple[Slot, InstalledModel]:
        """The slot that answers for a name or alias, made if there is none.

        Raises `StoreError`, and `WrongTask` for a model that is not there and does none of `tasks`.
        """
        installed = self._installed.get(name)
        slot = self.slots.get(worker_key(installed)) if installed else None
        if installed is None or slot is None or slot.model is None or installed.name not in slot.names:
            installed = await asyncio.to_thread(self._find_for, name, tasks)
            self._installed[name] = installed
            slot = self.slots.get(worker_key(installed)) or self._new_slot(installed, told)
            if installed.name not in slot.names:
                slot.names.append(installed.name)
        return slot, installed

    async def known(self, name: str) -> tuple[Slot | None, InstalledModel]:
        """Who answers for a name now, found also when the model's files are gone.  Raises `StoreError`."""
        known = self._known_as(name)
        installed = known[0] if known else await asyncio.to_thread(self._find_model, name)
        slot = self.slots.get(worker_key(installed))
        return (slot if slot is not None and installed.name in slot.names else None), installed

    def here(self, name: str) -> Slot:
        """The slot of a model that has a worker.  Raises `ModelNotLoaded`."""
        for installed in self._known_as(name):
            slot = self.slots.get(worker_key(installed))
            if slot is not None and slot.model is not None and installed.name in slot.names:
                return slot
        raise ModelNotLoaded(f"{name} is not in memory; load it with `quire load {name}`.")

    def forget_name(self, installed: InstalledModel) -> None:
        """The next request for this model, by whatever name, is looked up anew."""
        self._installed = {asked: model for asked, model in self._installed.items() if model.name != installed.name}

    def drop_blanks(self) -> None:
        """Forget the slots of which nothing needs to be remembered."""
        for slot in [slot for slot in self.slots.values() if slot.is_blank]:
            del self.slots[slot.key]

    def _find_for(self, name: str, tasks: tuple[Task, ...]) -> InstalledModel:
        """The installed model of this name, if it does one of `tasks`; reads files."""
        installed = self._find_model(name)
        if tasks:
            require_task(name, task_of(installed.path), tasks)
        return installed

    def _known_as(self, name: str) -> list[InstalledModel]:
        return [installed for asked, installed in self._installed.items() if name in (asked, installed.name)]

    def _new_slot(self, installed: InstalledModel, told: Told) -> Slot:
        """Its name is the model's, unless an older version of that is still there."""
        taken = {slot.name for slot in self.slots.values()}
        candidates = (installed.name, *(f"{installed.name} ({number})" for number in range(2, len(taken) + 3)))
        name = next(name for name in candidates if name not in taken)
        wishes = Wishes.from_settings(self._settings, installed)
        key = worker_key(installed)
        slot = self.slots[key] = Slot(key, installed, name, wishes, self._settings.max_queue, told)
        return slot
