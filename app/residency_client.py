"""`ResidencyClient`: the part of the daemon's HTTP API that is about models in memory, as typed async methods.

It is `QuireClient.residency`, and uses that client's connection and errors.  Used by `app.cli` and `tui`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol, TypeVar

from app.schema.admin import ProgressLine
from app.schema.residency import ResidencyEvent, ResidencyEvents, RunningModelEntry, RunningModels, StoppedModel

T = TypeVar("T")


class Transport(Protocol):
    """How a request reaches the daemon; all methods raise `ClientError`."""

    async def request(
        self, method: str, path: str, shape: type[T], body: dict[str, Any] | None = None, *, is_patient: bool = False
    ) -> T: ...

    def progress(
        self, method: str, path: str, model: str, body: dict[str, Any] | None = None
    ) -> AsyncGenerator[ProgressLine, None]: ...

    def json_lines(self, path: str, shape: type[T]) -> AsyncGenerator[T, None]: ...


class ResidencyClient:
    """Each method raises `ClientError`.

    Those that change a model answer with what it is afterwards.  They take as long as the daemon needs to make
    room, to copy weights or to let requests finish, and so have no time limit.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def ps(self) -> RunningModels:
        """The models that are in memory, and how each device is split."""
        return await self._transport.request("GET", "/api/ps", RunningModels)

    def load(
        self,
        model: str,
        *,
        share: float | None = None,
        pin: bool | None = None,
        keep_alive: str | None = None,
    ) -> AsyncGenerator[ProgressLine, None]:
        """Bring a model into memory, yielding progress until it is ready for requests."""
        options = {"share": share, "pin": pin, "keep_alive": keep_alive}
        body = {"model": model} | {name: value for name, value in options.items() if value is not None}
        return self._transport.progress("POST", "/api/load", model, body)

    async def stop(self, model: str) -> bool:
        """Unload a model from memory; whether it was there."""
        return (await self._transport.request("POST", "/api/stop", StoppedModel, {"model": model})).stopped

    async def share(self, model: str, share: float) -> RunningModelEntry:
        """Give a model in memory another share of its device."""
        return await self._change("/api/share", {"model": model, "share": share})

    async def pin(self, model: str, *, is_pinned: bool) -> RunningModelEntry:
        """Keep a model in memory whatever else is asked for, or no longer."""
        return await self._change("/api/pin", {"model": model, "pin": is_pinned})

    async def sleep(self, model: str) -> RunningModelEntry:
        """Give a model's device memory back and keep its weights at hand."""
        return await self._change("/api/sleep", {"model": model})

    async def wake(self, model: str) -> RunningModelEntry:
        """Bring a sleeping model back."""
        return await self._change("/api/wake", {"model": model})

    async def events(self) -> tuple[ResidencyEvent, ...]:
        """What happened to models in memory and why, oldest first."""
        return (await self._transport.request("GET", "/api/events", ResidencyEvents)).events

    def follow_events(self) -> AsyncGenerator[ResidencyEvent, None]:
        """The same, and then each event as it happens, until the daemon ends or the generator is closed."""
        return self._transport.json_lines("/api/events?follow=true", ResidencyEvent)

    async def _change(self, path: str, body: dict[str, Any]) -> RunningModelEntry:
        return await self._transport.request("POST", path, RunningModelEntry, body, is_patient=True)
