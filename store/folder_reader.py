"""`FolderReader`: what models folders hold, within a bounded time although a folder may never answer.

A folder on a network disk whose server is gone blocks whoever looks into it, for ever and beyond any signal.  So
every folder is looked into by a thread of its own, and at most one of them waits for a folder.  Knows nothing of
which folders matter; called by `external_folders` and `quire disk list`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from store.background import in_background
from store.external import ExternalModel, scan_folder

Look = Callable[[Path, Callable[[], None]], list[ExternalModel] | None]
"""Looks into a folder and calls back once that has answered at all; None for one that is not there."""


@dataclass(frozen=True, slots=True)
class FolderPatience:
    """Seconds until a folder must have answered at all, and until all of it must have been read."""

    answer_s: float = 2.0
    scan_s: float = 60.0


@dataclass(frozen=True, slots=True)
class FolderScan:
    """What a folder holds now; no models unless it is `there`."""

    folder: Path
    state: Literal["there", "missing", "silent"]
    models: tuple[ExternalModel, ...] = ()


@dataclass(slots=True)
class _Question:
    """One look into a folder, in a thread of its own."""

    folder: Path
    answered: threading.Event
    models: Future[list[ExternalModel] | None]
    begun_s: float = field(default_factory=time.monotonic)
    is_told: bool = False

    def wait(self, patience: FolderPatience) -> FolderScan:
        """The answer; `silent` once its time is over, at once if that was before."""
        waited_s = time.monotonic() - self.begun_s
        try:
            if not self.answered.wait(max(0.0, patience.answer_s - waited_s)):
                return FolderScan(self.folder, "silent")
            models = self.models.result(max(0.0, patience.scan_s - waited_s))
        except TimeoutError:
            return FolderScan(self.folder, "silent")
        if models is None:
            return FolderScan(self.folder, "missing")
        return FolderScan(self.folder, "there", tuple(models))


def look_into(folder: Path, on_answer: Callable[[], None]) -> list[ExternalModel] | None:
    """The models of a folder; None where it is missing or its disk fails."""
    try:
        if not folder.is_dir():
            return None
        # The kernel may know that it is a directory without asking the server.
        with os.scandir(folder) as entries:
            next(entries, None)
        on_answer()
        return scan_folder(folder)
    except PermissionError:
        return []
    except OSError:
        return None
    finally:
        on_answer()


class FolderReader:
    """Looks into folders; `tell` hears one sentence about each that does not answer.  Threads may share one."""

    def __init__(
        self,
        tell: Callable[[str], None] = lambda _: None,
        patience: FolderPatience = FolderPatience(),  # frozen, so sharing it is safe
        look: Look = look_into,
    ) -> None:
        self._tell = tell
        self._patience = patience
        self._look = look
        self._open: dict[Path, _Question] = {}
        self._lock = threading.Lock()

    def scan(self, folders: Sequence[Path]) -> list[FolderScan]:
        """What each of the folders holds, in that order; all are looked into at once."""
        questions = [self._ask(folder) for folder in folders]
        scans = [question.wait(self._patience) for question in questions]
        for question, scan in zip(questions, scans, strict=True):
            if scan.state == "silent" and self._is_news(question):
                self._tell(
                    f"{scan.folder} does not answer, so its models are left out; check its disk or network, or take "
                    f"it off the list with `quire disk remove {scan.folder}`."
                )
        return scans

    def _ask(self, folder: Path) -> _Question:
        """A new question, or the one that waits for this folder already."""
        with self._lock:
            question = self._open.get(folder)
            if question is None or question.models.done():
                answered = threading.Event()
                question = _Question(folder, answered, in_background(lambda: self._look(folder, answered.set)))
                self._open[folder] = question
            return question

    def _is_news(self, question: _Question) -> bool:
        with self._lock:
            was_told, question.is_told = question.is_told, True
            return not was_told
