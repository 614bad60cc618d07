"""From a command to the models on this machine, without a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.settings import Settings
    from store.models import ModelStore


def open_store(settings: Settings) -> ModelStore:
    """The models of the data root, for looking and for small changes.

    Not `DataRoot.open`, which proves that the disk takes a write: looking needs none.
    """
    from store.models import ModelStore
    from store.paths import DataRoot

    return ModelStore(DataRoot.look(settings.data_root))
