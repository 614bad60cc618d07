"""Brings one installed model to life: worker process, text side, and what ties the two together.

Knows what a resident model consists of, but not which ones stay: that is
`app.residency.supervisor`, its only caller.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq.asyncio

from app.generation import Generator
from app.metrics import Metrics
from app.pooling import Pooler
from app.residency.open_requests import OpenRequests
from app.residency.worker_client import OnProgress, WorkerClient
from app.settings import Settings
from engine.api.config import EngineConfig
from engine.api.wire import EngineStats, WorkerFacts
from engine.pooling.config import read_pooling
from engine.text.generation_defaults import load_generation_defaults
from engine.text.pooling_stage import PoolingStage
from engine.text.stage import TextStage, open_text_files
from engine.text.text_encoder import load_text_encoder
from store.models import InstalledModel
from store.paths import DataRoot

if TYPE_CHECKING:
    from app.usage_recorder import UsageRecorder


@dataclass(slots=True)
class ResidentModel:
    """A loaded model; `seen_stats` is the part of the worker's counters that is already exported.

    `names` are the installed models that it answers for: `installed`, as which it was loaded, and others of
    the same files, which differ in their presets alone.  It has a `generator` if it writes, else a `pooler`.
    """

    installed: InstalledModel
    facts: WorkerFacts
    worker: WorkerClient
    open_requests: OpenRequests
    generator: Generator | None
    pooler: Pooler | None
    defaults_from_files: dict[str, float]
    loaded_at: float
    names: list[str]
    seen_stats: EngineStats = field(default_factory=EngineStats)

    @property
    def name(self) -> str:
        return self.installed.name

    def sampling_defaults(self, model: InstalledModel) -> dict[str, Any]:
        """What holds for requests to one of `names` where they are silent."""
        from_preset = model.preset.parameters.sampling() if model.preset else {}
        return {**model.sampling_defaults, **self.defaults_from_files, **from_preset}

    @property
    def is_idle(self) -> bool:
        return self.open_requests.num == 0


def worker_key(model: InstalledModel) -> tuple[Path, int | None]:
    """What a worker is made for: installed models of equal keys can share one."""
    return model.path, model.preset.parameters.context_length if model.preset else None


class ModelLoader:
    """Starts workers with `worker_command` and one socket each under `runtime_dir`."""

    def __init__(
        self,
        settings: Settings,
        data_root: DataRoot,
        runtime_dir: Path,
        metrics: Metrics,
        usage: UsageRecorder,
        *,
        worker_command: Sequence[str],
    ) -> None:
        self._settings = settings
        self._data_root = data_root
        self._runtime_dir = runtime_dir
        self._metrics = metrics
        self._usage = usage
        self._worker_command = tuple(worker_command)
        self._context = zmq.asyncio.Context()

    async def load(self, installed: InstalledModel, budget_bytes: int, on_progress: OnProgress) -> ResidentModel:
        """Start a worker within `budget_bytes` and open the text side; leaves nothing behind on failure."""
        worker = WorkerClient(self._context, self._runtime_dir)
        # The text files are read while the worker loads the weights.
        text_files = asyncio.create_task(asyncio.to_thread(_open_text, installed.path))
        try:
            facts = await worker.start(
                self._worker_command,
                {**self._data_root.library_environment(), **_thread_environment(os.environ)},
                self._data_root.logs / f"worker-{_file_name(installed.name)}.log",
                self._engine_config(installed, budget_bytes),
                timeout_s=self._settings.worker_start_timeout_s,
                on_progress=on_progress,
            )
            make_stage = await text_files
            from_files = await asyncio.to_thread(load_generation_defaults, installed.path)
            stage = make_stage(facts)
        except BaseException:
            await worker.close(self._settings.worker_stop_timeout_s)
            await asyncio.gather(text_files, return_exceptions=True)
            raise
        generator, pooler = None, None
        if isinstance(stage, TextStage):
            generator = Generator(installed.name, stage, worker, self._metrics, self._usage)
        else:
            pooler = Pooler(installed.name, stage, worker, self._metrics, self._usage, facts.device)
        return ResidentModel(
            installed=installed,
            facts=facts,
            worker=worker,
            open_requests=OpenRequests(installed.name, self._settings.max_queue),
            generator=generator,
            pooler=pooler,
            defaults_from_files=from_files,
            loaded_at=time.time(),
            names=[installed.name],
        )

    def close(self) -> None:
        """Release the socket library; every worker must be closed before."""
        self._context.destroy(linger=0)

    def _engine_config(self, installed: InstalledModel, budget_bytes: int) -> EngineConfig:
        settings = self._settings
        return EngineConfig(
            model=str(installed.path),
            device=settings.device,
            load_format=settings.load_format,
            quantization=settings.quantization,
            max_model_len=_max_model_len(settings, installed),
            max_num_seqs=settings.max_num_seqs,
            memory_budget_bytes=budget_bytes,
            num_threads=settings.num_threads,
            pin_threads=settings.pin_threads,
            wait_policy=settings.wait_policy,
            seed=secrets.randbits(63),
            cache_dir=str(self._data_root.kernels),
        )


def _open_text(model: Path) -> Callable[[WorkerFacts], TextStage | PoolingStage]:
    """Read what a model says about text; its stage follows once the worker says how large everything is."""
    pooling = read_pooling(model)
    if pooling is None:
        tokenizer, chat_template = open_text_files(model)
        return lambda facts: TextStage(tokenizer, chat_template, facts.max_model_len, facts.vocab_size)
    encoder = load_text_encoder(model)
    return lambda facts: PoolingStage(
        encoder,
        pooling,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        embedding_length=facts.embedding_length,
    )


def _max_model_len(settings: Settings, installed: InstalledModel) -> int | None:
    """The smaller one of what the settings and the model's preset allow; None for the model's own."""
    lengths = (settings.max_model_len, worker_key(installed)[1])
    return min((length for length in lengths if length is not None), default=None)


def _thread_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Let the worker's compute threads sleep while they wait for one another, unless the user decides otherwise.

    By default they spin, and on cores that other programs use too that made a step four times slower
    (docs/log.md, 2026-11-21).
    """
    return {} if "OMP_WAIT_POLICY" in environ else {"OMP_WAIT_POLICY": "PASSIVE"}


def _file_name(model_name: str) -> str:
    """A model name as part of a file name; long paths keep their end."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model_name).strip("-")[-100:]
