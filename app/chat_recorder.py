"""Saves an answer while it is streamed, so that a chat survives whatever ends it.

The conversation is written before the answer begins, the answer every two seconds while it grows, and
its end with its numbers.  A daemon that dies leaves a turn "streaming"; the next one ends it with the
text it had (`ChatsDb.cancel_leftovers`).  Knows neither HTTP nor models; used by `app.api.chats`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from engine.api.output import OutputDelta
from store.chats.records import EndStatus, Message, TurnNumbers
from store.chats.tree import ChatsDb
from store.database import DatabaseThread
from store.errors import DatabaseUnusable

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that awaits its answer; `params` are the sampling fields that were given.

    `model` is the name of the model, `revision` its repository and commit.
    """

    chat_id: str
    messages: Sequence[Message]
    model: str
    revision: str
    params: Mapping[str, Any]


class TurnRecorder:
    """One answer to one question; `interval_s` is the most that a kill may cost, `clock` measures seconds."""

    def __init__(
        self,
        database: DatabaseThread,
        question: Question,
        *,
        interval_s: float = SAVE_INTERVAL_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._database = database
        self._question = question
        self._interval_s = interval_s
        self._clock = clock
        self._turn_id = 0
        self._texts: list[str] = []
        self._prompt_tokens: int | None = None
        self._num_tokens = 0
        self._num_first_tokens = 0
        self._started_at = clock()
        self._first_at: float | None = None
        self._last_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def follow(self, batches: AsyncGenerator[list[OutputDelta], None]) -> AsyncGenerator[list[OutputDelta], None]:
        """Pass on an answer of one choice and save it; the question is saved before the answer is asked for.

        Raises ChatNotFound and DatabaseUnusable before the first batch, and what `batches` raises.
        """
        question = self._question
        self._turn_id = await self._database.run(
            lambda connection: ChatsDb(connection).begin_turn(
                question.chat_id, question.messages, question.model, question.params, revision=question.revision
            )
        )
        status: EndStatus = "cancelled"
        try:
            async with aclosing(batches):
                async for deltas in batches:
                    self._add(deltas)
                    yield deltas
            status = "done"
        except Exception:
            status = "error"
            raise
        finally:
            await self._end(status)

    def _add(self, deltas: Sequence[OutputDelta]) -> None:
        self._last_at = self._clock()
        for delta in deltas:
            self._texts.append(delta.text)
            self._num_tokens += len(delta.token_ids)
            if delta.usage is not None:
                self._prompt_tokens = delta.usage.prompt_tokens
        if self._first_at is None:
            self._first_at = self._last_at
            self._num_first_tokens = self._num_tokens
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._save_partial)

    def _save_partial(self) -> None:
        self._timer = None
        text = "".join(self._texts)
        self._texts = [text]
        saving = self._database.submit(lambda connection: ChatsDb(connection).save_partial(self._turn_id, text))
        saving.add_done_callback(_log_failure)

    async def _end(self, status: EndStatus) -> None:
        """Save the whole answer and its numbers; a failure is for the log, since the answer itself has been given."""
        if self._timer is not None:
            self._timer.cancel()
        text = "".join(self._texts)
        answer = Message.of_text("assistant", text) if text else None
        numbers = self._numbers()
        # Submitted before anything is awaited: a second cancellation then cannot keep it from happening.
        saving = self._database.submit(
            lambda connection: ChatsDb(connection).finish_turn(self._turn_id, status, answer, numbers)
        )
        saving.add_done_callback(_log_failure)
        await asyncio.wait({asyncio.wrap_future(saving)})

    def _numbers(self) -> TurnNumbers:
        if self._first_at is None:
            return TurnNumbers(duration_s=self._clock() - self._started_at)
        num_later_tokens, decode_s = self._num_tokens - self._num_first_tokens, self._last_at - self._first_at
        return TurnNumbers(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._num_tokens,
            time_to_first_token_s=self._first_at - self._started_at,
            tokens_per_s=num_later_tokens / decode_s if num_later_tokens and decode_s > 0 else None,
            duration_s=self._clock() - self._started_at,
        )


def _log_failure(saving: Future[None]) -> None:
    error = saving.exception()
    if isinstance(error, DatabaseUnusable):
        logger.error("An answer could not be saved: %s", error.message)
    elif error is not None:
        logger.error("An answer could not be saved", exc_info=error)
