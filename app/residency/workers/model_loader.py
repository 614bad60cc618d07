"""Brings one installed model to life: worker process, text side, and what ties the two together.

Knows what a resident model consists of, but not which ones stay: that is
`app.residency.lifecycle`, its only caller.
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

import msgspec
import zmq.asyncio

from app.generation import Generator
from app.metrics import Metrics
from app.pooling import Pooler
from app.residency.workers.worker_client import OnProgress, WorkerClient
from app.settings import Settings
from engine.api.config import EngineConfig
from engine.api.wire import EngineStats, WorkerFacts, WorkerMemory
from engine.pooling.config import read_pooling
from engine.text.generation_defaults import load_generation_defaults
from engine.text.pooling_stage import PoolingStage
from engine.text.stage import TextStage, open_text_files
from engine.text.text_encoder import load_text_encoder
from store.models import InstalledModel
from store.paths import DataRoot

if TYPE_CHECKING:
    from app.usage_recorder import UsageRecorder


WorkerKey = tuple[Path, int | None]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Where a worker runs, what it may take there, and the longest context it may serve if that was chosen for it."""

    device: str
    budget_bytes: int
    max_model_len: int | None = None


@dataclass(slots=True)
class ResidentModel:
    """A loaded model; `seen_stats` is the part of the worker's counters that is already exported.

    It has a `generator` if it writes, else a `pooler`; `stage` is the text side of either.
    """

    installed: InstalledModel
    facts: WorkerFacts
    worker: WorkerClient
    stage: TextStage | PoolingStage
    generator: Generator | None
    pooler: Pooler | None
    defaults_from_files: dict[str, float]
    loaded_at: float
    seen_stats: EngineStats = field(default_factory=EngineStats)

    @property
    def name(self) -> str:
        return self.installed.name

    @property
    def fixed_bytes(self) -> int:
        """What it holds of its device besides the KV cache while it is awake."""
        return self.facts.fixed_bytes or self.facts.weight_bytes

    @property
    def block_bytes(self) -> int:
        return self.facts.block_size * self.facts.kv_bytes_per_token

    @property
    def kv_bytes(self) -> int:
        """The size of its KV cache while it is awake."""
        return self.facts.num_kv_blocks * self.block_bytes

    @property
    def most_kv_bytes(self) -> int:
        """How far its KV cache can grow."""
        return max(self.facts.max_kv_blocks, self.facts.num_kv_blocks) * self.block_bytes

    def blocks_of(self, kv_bytes: int) -> int:
        """How many whole blocks so many bytes are, within what the worker can have; 0 for a model without a cache."""
        most = max(self.facts.max_kv_blocks, self.facts.num_kv_blocks)
        return max(min(1, most), min(kv_bytes // self.block_bytes, most)) if self.block_bytes else 0

    def adopt(self, memory: WorkerMemory) -> None:
        """Go by what the worker holds now, the text side included."""
        self.facts = msgspec.structs.replace(
            self.facts,
            num_kv_blocks=memory.num_kv_blocks,
            max_model_len=memory.max_model_len,
            fixed_bytes=memory.fixed_bytes,
        )
        self.stage.max_model_len = memory.max_model_len

    def sampling_defaults(self, model: InstalledModel) -> dict[str, Any]:
        """What holds where a request for `model`, which is of the same files, is silent."""
        from_preset = model.preset.parameters.sampling() if model.preset else {}
        return {**model.sampling_defaults, **self.defaults_from_files, **from_preset}


def worker_key(model: InstalledModel) -> WorkerKey:
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

    async def load(self, installed: InstalledModel, order: LoadOrder, on_progress: OnProgress) -> ResidentModel:
        """Start a worker as ordered and open the text side; leaves nothing behind on failure."""
        worker = WorkerClient(self._context, self._runtime_dir)
        # The text files are read while the worker loads the weights.
        text_files = asyncio.create_task(asyncio.to_thread(_open_text, installed.path))
        try:
            facts = await worker.start(
                self._worker_command,
                {**self._data_root.library_environment(), **_thread_environment(os.environ)},
                self._data_root.logs / f"worker-{_file_name(installed.name)}.log",
                self._engine_config(installed, order),
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
            stage=stage,
            generator=generator,
            pooler=pooler,
            defaults_from_files=from_files,
            loaded_at=time.time(),
        )

    def close(self) -> None:
        """Release the socket library; every worker must be closed before."""
        self._context.destroy(linger=0)

    def _engine_config(self, installed: InstalledModel, order: LoadOrder) -> EngineConfig:
        settings = self._settings
        return EngineConfig(
            model=str(installed.path),
            device=order.device,
            load_format=settings.load_format,
            quantization=settings.quantization,
            max_model_len=_max_model_len(settings, installed, order),
            max_num_seqs=settings.max_num_seqs,
            memory_budget_bytes=order.budget_bytes,
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


def _max_model_len(settings: Settings, installed: InstalledModel, order: LoadOrder) -> int | None:
    """The smallest one of what the settings, the order and the model's preset allow; None for the model's own."""
    lengths = (settings.max_model_len, order.max_model_len, worker_key(installed)[1])
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
