"""`UsageRecorder`: counts the lengths of prompts and answers in memory, and writes them in batches.

Recording costs a request two dictionary updates and no write.  What was counted within the last
interval is lost when the daemon is killed.  `app.generation` records, `app.server` runs the writing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from store.database import DatabaseThread
from store.errors import DatabaseUnusable
from store.usage_db import Lengths, UsageDb

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0


class UsageRecorder:
    """The lengths of all models of one daemon; `clock` gives seconds since the epoch."""

    def __init__(self, database: DatabaseThread, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._pending: dict[str, Lengths] = {}
        self._last_failure = ""

    def record(
        self, model: str, prompt_tokens: int, output_tokens: int, *, max_model_len: int, num_at_once: int = 1
    ) -> None:
        """Count one sequence that has ended, in tokens; `num_at_once` of the model were open, itself among them."""
        lengths = self._pending.get(model)
        if lengths is None:
            lengths = self._pending[model] = Lengths(max_model_len)
        lengths.max_model_len = max_model_len
        lengths.add(prompt_tokens, output_tokens, self._clock(), num_at_once=num_at_once)

    async def flush(self) -> None:
        """Write what was counted; where that fails it is dropped, with one warning per kind of failure."""
        if not self._pending:
            return
        batch, self._pending = self._pending, {}
        try:
            await self._database.run(lambda connection: UsageDb(connection).add(batch))
        except DatabaseUnusable as error:
            if error.message != self._last_failure:
                logger.warning("The lengths of requests are not recorded: %s", error.message)
            self._last_failure = error.message

    async def run(self, interval_s: float = INTERVAL_S) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self.flush()
