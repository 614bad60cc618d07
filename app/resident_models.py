"""Brings in the models that shall be there from the start, in their order, beside whatever else the daemon does.

A model that cannot be loaded is an event and a line of the log; the daemon and the other models go on.  Called by
`app.server`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing

from app.errors import AppError
from app.residency.supervisor import Supervisor
from app.residency_settings import ResidentSettings
from engine.api.errors import EngineError
from store.errors import InvalidName, ModelNotFound, StoreError

logger = logging.getLogger(__name__)

_WHY = "The settings want it in memory from the start."


async def load_residents(residents: Sequence[ResidentSettings], supervisor: Supervisor) -> None:
    """Returns when each is ready or has failed; cancelling it stops no load that has begun."""
    async with asyncio.TaskGroup() as loads:
        for resident in residents:
            is_in_line = asyncio.Event()
            loads.create_task(_load(resident.model, supervisor, is_in_line))
            # Before the next one asks, so that they are loaded in this order.
            await is_in_line.wait()


async def _load(name: str, supervisor: Supervisor, is_in_line: asyncio.Event) -> None:
    try:
        async with aclosing(supervisor.load(name, why=_WHY)) as reports:
            async for _ in reports:
                is_in_line.set()
    except (ModelNotFound, InvalidName) as error:
        # Nobody else knows of a model that is not installed.
        supervisor.events.record("fail", name, error.message)
    except (AppError, EngineError, StoreError) as error:
        logger.debug("%s is not there from the start: %s", name, error)
    finally:
        is_in_line.set()
