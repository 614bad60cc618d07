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
from store.names import parse_model_name

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.01


async def load_residents(residents: Sequence[ResidentSettings], supervisor: Supervisor) -> None:
    """Returns when each is ready or has failed; cancelling it stops no load that has begun."""
    async with asyncio.TaskGroup() as loads:
        for resident in residents:
            load = loads.create_task(_load(resident.model, supervisor))
            # In line before the next one asks, so that it is loaded before that, and listed while it waits.
            while not load.done() and not _is_listed(resident.model, supervisor):  # noqa: ASYNC110  # whoever waits in line sets no event
                await asyncio.sleep(_LOOK_AGAIN_S)


async def _load(name: str, supervisor: Supervisor) -> None:
    try:
        async with aclosing(supervisor.load(name)) as reports:
            async for _ in reports:
                pass
    except (ModelNotFound, InvalidName) as error:
        # Nobody else knows of a model that is not installed.
        supervisor.events.record("fail", name, error.message)
    except (AppError, EngineError, StoreError) as error:
        logger.debug("%s is not there from the start: %s", name, error)


def _is_listed(name: str, supervisor: Supervisor) -> bool:
    text = parse_model_name(name).text
    return any(text in state.names for state in supervisor.states())
