"""`Roster`: the slots of all models that are in memory, asked for, or to be remembered, and who answers for a name.

The one place where names and aliases become models: they are looked up in the store once, and again only when their
model is not there.  Used by the supervisor, on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from app.errors import ModelNotLoaded
from app.model_task import require_task, task_of
from app.residency.slot import Phase, Slot, Told
from app.residency.wishes import Wishes
from app.residency.workers.model_loader import WorkerKey, worker_key
from app.residency_settings import ResidentSettings
from app.settings import Settings
from engine.api.wire import Task
from store.errors import StoreError
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

        Raises `StoreError`, and `WrongTask` for a model that does none of `tasks`, if some are given.
        """
        installed = self._installed.get(name)
        slot = self.slots.get(worker_key(installed)) if installed else None
        if installed is None or slot is None or slot.model is None or installed.name not in slot.names:
            installed = await asyncio.to_thread(self._find_for, name, tasks)
            key = worker_key(installed)
            if key not in self.slots:
                resident = await asyncio.to_thread(self._settings_of, installed)
                # Another request may have been here meanwhile.
                if key not in self.slots:
                    self.slots[key] = self._new_slot(installed, resident, told)
            slot = self.slots[key]
            self._installed[name] = installed
            if installed.name not in slot.names:
                slot.names.append(installed.name)
        elif tasks:
            require_task(name, slot.model.facts.task, tasks)
        return slot, installed

    async def answering(self, name: str) -> tuple[str, Slot | None]:
        """What the model of this name or alias is called, and the slot that answers for it now, if there is one.

        That is found also when the model's files are gone.  Raises `StoreError`.
        """
        known = self._installed.get(name)
        canonical = name if known is None else known.name
        slot = self._named(canonical)
        if slot is None:
            canonical = (await asyncio.to_thread(self._find_model, name)).name
            slot = self._named(canonical)
        return canonical, slot

    async def here(self, name: str) -> tuple[str, Slot]:
        """As `answering`, for a model that is in memory or on its way.  Raises `ModelNotLoaded` and `StoreError`."""
        canonical, slot = await self.answering(name)
        if slot is None or slot.phase is Phase.COLD:
            raise ModelNotLoaded(f"{canonical} is not in memory; load it with `quire load {canonical}`.")
        return canonical, slot

    def forget_name(self, canonical: str) -> None:
        """The next request for this model, by whatever name, is looked up anew."""
        self._installed = {asked: model for asked, model in self._installed.items() if model.name != canonical}

    def drop_blanks(self) -> None:
        """Forget the slots of which nothing needs to be remembered."""
        for slot in [slot for slot in self.slots.values() if slot.is_blank]:
            del self.slots[slot.key]

    def _named(self, canonical: str) -> Slot | None:
        return next((slot for slot in self.slots.values() if canonical in slot.names), None)

    def _find_for(self, name: str, tasks: tuple[Task, ...]) -> InstalledModel:
        """The installed model of this name, if it does one of `tasks`; reads files."""
        installed = self._find_model(name)
        if tasks:
            require_task(name, task_of(installed.path), tasks)
        return installed

    def _settings_of(self, installed: InstalledModel) -> ResidentSettings | None:
        """What `[[resident]]` says of a model, by whichever of its names; reads files."""
        for resident in self._settings.residents:
            with contextlib.suppress(StoreError):
                if self._find_model(resident.model).name == installed.name:
                    return resident
        return None

    def _new_slot(self, installed: InstalledModel, resident: ResidentSettings | None, told: Told) -> Slot:
        """Its name is the model's, unless an older version of that is still there."""
        taken = {slot.name for slot in self.slots.values()}
        candidates = (installed.name, *(f"{installed.name} ({number})" for number in range(2, len(taken) + 3)))
        name = next(name for name in candidates if name not in taken)
        wishes = Wishes.of_settings(self._settings, resident)
        return Slot(worker_key(installed), installed, name, wishes, self._settings.max_queue, told)
