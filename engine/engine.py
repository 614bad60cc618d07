"""`Engine`: what a worker drives, whatever kind of model is behind it.

`open_engine` loads a model into the engine of its kind.  Called by `engine.worker` and `engine.llm`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from engine.api.config import EngineConfig
from engine.api.output import StepOutput
from engine.api.request import Prompt
from engine.api.wire import EngineStats, WorkerFacts, WorkerMemory
from engine.build import OnProgress
from engine.encoder_loop import EncoderLoop
from engine.loading.safetensors_checkpoint import read_config_json
from engine.loop import EngineLoop
from engine.models.registry import is_encoder


class Engine(Protocol):
    """One model, ready to run; not thread-safe, driven by one thread."""

    facts: WorkerFacts
    """What the engine got when it was loaded."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to return."""
        ...

    @property
    def has_spare_work(self) -> bool:
        """Whether `spare_step` has something to prepare while there is nothing else to do."""
        ...

    def spare_step(self) -> None:
        """Prepare one thing that later steps need; some tens of milliseconds."""
        ...

    def submit(self, prompt: Prompt) -> None:
        """Queue a sequence.  Raises `EngineError` if it can never run."""
        ...

    def abort(self, sequence_id: int) -> StepOutput | None:
        """Drop a sequence and free what it holds now; None if it is not known."""
        ...

    def stats(self) -> EngineStats: ...

    def step(self) -> list[StepOutput]:
        """Advance what the budgets allow by one step."""
        ...

    def memory(self) -> WorkerMemory:
        """What the engine holds now."""
        ...

    def resize_cache(self, num_blocks: int) -> WorkerMemory:
        """Grow or shrink the KV cache to `num_blocks`, as near as possible; no open sequence is lost.

        Raises `EngineError`, with nothing changed, when it cannot grow at all, and while the engine sleeps.
        """
        ...

    def sleep(self) -> WorkerMemory:
        """Give the device's memory back as far as possible; `wake` alone may follow.

        Raises `EngineBusy` while sequences are open, `InsufficientMemory` when RAM has no room for the weights, and
        `EngineError` where they cannot leave; and then changed nothing.
        """
        ...

    def wake(self, num_blocks: int) -> WorkerMemory:
        """Be as before the sleep, with a KV cache of `num_blocks`, or as near as possible.

        Raises `InsufficientMemory`, and sleeps on.
        """
        ...


def open_engine(config: EngineConfig, on_progress: OnProgress = lambda stage, done, total: None) -> Engine:
    """Load a model.  Raises `UnsupportedModel`, `BrokenCheckpoint`, `InsufficientMemory` or `InvalidParameter`."""
    if _is_encoder(config):
        return EncoderLoop(config, on_progress)
    return EngineLoop(config, on_progress)


def _is_encoder(config: EngineConfig) -> bool:
    """Whether the model is a checkpoint directory of an encoder; GGUF files of encoders are refused as decoders."""
    path = Path(config.model)
    if config.load_format == "gguf" or not (path / "config.json").is_file():
        return False
    return is_encoder(read_config_json(path))
