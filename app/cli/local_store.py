"""From a command to the models on this machine, without a daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from app.cli.output import notice

if TYPE_CHECKING:
    from app.settings import Settings
    from store.models import ModelStore


def open_store(settings: Settings) -> ModelStore:
    """The models of the data root, for looking and for small changes.

    Not `DataRoot.open`, which proves that the disk takes a write: looking needs none.
    """
    from store.models import ModelStore
    from store.paths import DataRoot

    return ModelStore(DataRoot.look(settings.data_root), tell=notice)


@contextmanager
def changing_store(settings: Settings, *, creates: bool = False) -> Iterator[ModelStore]:
    """The models of the data root, for changes: it is not moved to another disk meanwhile.

    A command that brings something `creates` the data root where there is none.
    """
    from store.models import ModelStore
    from store.paths import DataRoot

    root = DataRoot.open(settings.data_root) if creates else DataRoot.look(settings.data_root)
    if not root.root.is_dir():
        yield ModelStore(root, tell=notice)
        return
    with root.in_use():
        yield ModelStore(root, tell=notice)
