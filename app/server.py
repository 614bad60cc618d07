"""The daemon's composition root: builds every part, wires the routes, and serves them.

`create_app` makes the Litestar application; `serve` runs it under uvicorn as the only daemon
of this user's state directory.  Importing this module loads no torch: models run in worker
processes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from litestar import Litestar
from litestar.di import Provide
from litestar.middleware import DefineMiddleware
from litestar.openapi import OpenAPIConfig

from app.api.admin import admin_router
from app.api.chats import chats_router
from app.api.embeddings import embedding_routes
from app.api.error_responses import EXCEPTION_HANDLERS
from app.api.health import daemon_routes
from app.api.jobs import jobs_router, pull_model
from app.api.openai import openai_router
from app.api.rerank import rerank_routes
from app.api.residency import residency_router
from app.api.schema_page import SchemaPage
from app.api.usage import get_usage
from app.draining_server import DrainingServer
from app.errors import StartupError
from app.host_guard import HostGuard
from app.hub import hub_settings
from app.instance import single_instance, write_record
from app.job_journal import JOURNAL_NAME, JobJournal
from app.jobs import Jobs
from app.log_format import configure_logging
from app.metrics import Metrics
from app.residency.advice.acceptance import accept, host_of
from app.residency.arithmetic.demand import Traffic
from app.residency.arithmetic.memory import DeviceMemory
from app.residency.config_facts import config_facts
from app.residency.devices import measure_all, process_memory_bytes
from app.residency.need_reader import NeedReader
from app.residency.room import Gauges
from app.residency.supervisor import Supervisor
from app.residency.workers.model_loader import ModelLoader
from app.residency_settings import check_shares
from app.resident_models import load_residents
from app.schema.admin import PullRequest
from app.settings import Settings
from app.throughput_log import log_throughput
from app.usage_recorder import UsageRecorder
from app.version import VERSION
from store.chats.tree import ChatsDb
from store.database import DatabaseThread
from store.errors import DatabaseUnusable
from store.facts import ModelFacts
from store.known_facts import KnownFacts
from store.models import InstalledModel, ModelStore
from store.paths import DataRoot, user_paths
from store.progress import CancelCheck, ProgressCallback, PullProgress
from store.pull import AcceptModel, pull
from store.usage_db import UsageDb

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-P", "-m", "engine.worker")


@dataclass(frozen=True, slots=True)
class Parts:
    """What the daemon takes from elsewhere; tests put fakes in place of single parts."""

    data_root: DataRoot
    pull: Callable[[PullRequest, ProgressCallback, CancelCheck, AcceptModel | None], InstalledModel]
    runtime_dir: Path
    database: Path
    jobs_journal: Path
    worker_command: tuple[str, ...] = WORKER_COMMAND
    measure_devices: Callable[[str], Sequence[DeviceMemory]] = measure_all


def real_parts(settings: Settings) -> Parts:
    """Raises `DataRootUnusable`."""
    data_root = DataRoot.open(settings.data_root)

    def pull_model(
        request: PullRequest, on_progress: ProgressCallback, is_cancelled: CancelCheck, accept: AcceptModel | None
    ) -> InstalledModel:
        hub = hub_settings(settings, is_offline=request.offline)
        limit = request.limit_bytes_per_s
        return pull(request.model, data_root, hub, on_progress, is_cancelled, limit_bytes_per_s=limit, accept=accept)

    return Parts(
        data_root=data_root,
        pull=pull_model,
        runtime_dir=user_paths().runtime_dir,
        database=user_paths().database,
        jobs_journal=user_paths().state_dir / JOURNAL_NAME,
    )


@dataclass(frozen=True, slots=True)
class Daemon:
    """The application, and the way to end its open answers."""

    app: Litestar
    drain: Callable[[], Awaitable[None]]


def create_app(settings: Settings, parts: Parts | None = None) -> Litestar:
    """The application alone, for any ASGI server; POST /api/shutdown then ends this process's server by SIGTERM."""
    return build_daemon(settings, parts, request_shutdown=lambda: signal.raise_signal(signal.SIGTERM)).app


def build_daemon(settings: Settings, parts: Parts | None, *, request_shutdown: Callable[[], None]) -> Daemon:
    """Compose everything; `request_shutdown` is what POST /api/shutdown calls.  Raises `DataRootUnusable`."""
    parts = real_parts(settings) if parts is None else parts
    models = ModelStore(parts.data_root, serves_paths=settings.binds_loopback, tell=logger.warning)
    facts = KnownFacts()
    metrics = Metrics()
    database = DatabaseThread(parts.database)
    usage = UsageRecorder(database)
    supervisor = _supervisor(settings, parts, models, facts, metrics, usage, database)

    def pull_if_it_can_run(
        request: PullRequest, on_progress: ProgressCallback, is_cancelled: CancelCheck
    ) -> InstalledModel:
        def accept_model(facts: ModelFacts) -> None:
            largest = max(parts.measure_devices(settings.device), key=lambda memory: memory.total_bytes)
            host = host_of(settings, largest)
            if shortcoming := accept(facts, host):
                on_progress(PullProgress(shortcoming))

        asked = None if request.force else accept_model
        return parts.pull(request, on_progress, is_cancelled, asked)

    jobs = Jobs(pull_if_it_can_run, JobJournal(parts.jobs_journal))

    async def drain() -> None:
        await asyncio.gather(jobs.drain(), supervisor.close())

    @asynccontextmanager
    async def lifespan(_app: Litestar) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(_end_leftovers(database)),
            asyncio.create_task(log_throughput(supervisor)),
            asyncio.create_task(usage.run()),
            asyncio.create_task(load_residents(settings.residents, supervisor)),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await drain()
            await usage.flush()
            await asyncio.to_thread(database.close)

    dependencies = {
        "database": database,
        "facts": facts,
        "settings": settings,
        "models": models,
        "instruments": metrics,
        "jobs": jobs,
        "request_shutdown": request_shutdown,
        "supervisor": supervisor,
        "usage": usage,
    }
    return Daemon(_application(settings, dependencies, lifespan), drain)


def _application(settings: Settings, dependencies: dict[str, Any], lifespan: Callable[[Litestar], Any]) -> Litestar:
    """Routes and framework options; `dependencies` are what handlers ask for by parameter name."""
    return Litestar(
        route_handlers=[
            openai_router,
            *embedding_routes,
            *rerank_routes,
            admin_router,
            residency_router,
            jobs_router,
            pull_model,
            chats_router,
            get_usage,
            *daemon_routes,
        ],
        dependencies={name: _constant(value) for name, value in dependencies.items()},
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=[lifespan],
        logging_config=None,
        middleware=[
            DefineMiddleware(HostGuard, api_key=settings.api_key, allowed_hosts=settings.allowed_hosts),
        ],
        openapi_config=OpenAPIConfig(title="Quire", version=VERSION, path="/schema", render_plugins=[SchemaPage()]),
        request_max_body_size=settings.request_body_limit_bytes,
    )


def serve(settings: Settings, parts: Parts | None = None) -> None:
    """Run the daemon until it is told to stop.

    Raises `StartupError` if another one runs here or the port is taken, `DataRootUnusable`.
    """
    configure_logging(settings.log_level)
    state_dir = user_paths().state_dir
    parts = real_parts(settings) if parts is None else parts
    _refuse_overfull_shares(settings, parts)
    with single_instance(state_dir), parts.data_root.in_use(), _listen(settings) as listener:
        daemon = build_daemon(settings, parts, request_shutdown=lambda: setattr(server, "should_exit", True))
        config = uvicorn.Config(daemon.app, log_config=None, access_log=False, server_header=False, lifespan="on")
        server = DrainingServer(config, daemon.drain)
        host, port = listener.getsockname()[:2]
        write_record(state_dir, host, port)
        # uvicorn raises the signal that ended it once more; the default action would skip what follows.
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, lambda *_: None)
        logger.info("Quire %s listens on http://%s:%d", VERSION, settings.host, port)
        # What the imports and the routes made stays for good; going through it would stall every stream.
        gc.freeze()
        server.run(sockets=[listener])
        logger.info("Stopped")


def _refuse_overfull_shares(settings: Settings, parts: Parts) -> None:
    """Shares that cannot all be kept are an error of the settings, better told now than at the last model's load."""
    if settings.residents:
        devices = [memory.device for memory in parts.measure_devices(settings.device)]
        check_shares(
            settings.residents,
            limit=settings.memory_limit,
            default_share=settings.gpu_memory_utilization,
            devices=devices,
        )


async def _end_leftovers(database: DatabaseThread) -> None:
    """Answers that the last daemon could not end are kept as far as they came; the first work of the database."""
    try:
        num_ended = await database.run(lambda connection: ChatsDb(connection).cancel_leftovers())
    except DatabaseUnusable as error:
        logger.error("Chats and usage cannot be saved: %s", error.message)
    else:
        if num_ended:
            logger.info("%d answers that the last daemon left unfinished are kept as far as they came", num_ended)


def _supervisor(
    settings: Settings,
    parts: Parts,
    models: ModelStore,
    facts: KnownFacts,
    metrics: Metrics,
    usage: UsageRecorder,
    database: DatabaseThread,
) -> Supervisor:
    loader = ModelLoader(
        settings,
        parts.data_root,
        parts.runtime_dir,
        metrics,
        usage,
        worker_command=parts.worker_command,
    )
    read_facts = config_facts if settings.load_format == "dummy" else facts.read

    async def read_traffic(model: str) -> Traffic | None:
        try:
            return await database.run(lambda connection: _traffic(UsageDb(connection), model))
        except DatabaseUnusable:
            return None

    return Supervisor(
        settings,
        loader,
        metrics,
        find_model=models.find,
        need_of=NeedReader(settings, read_facts, read_traffic).need_of,
        gauges=Gauges(parts.measure_devices, process_memory_bytes),
    )


def _traffic(usage: UsageDb, model: str) -> Traffic | None:
    """What a model's requests have been like, for the planner."""
    found = next((one for one in usage.models() if one.model == model), None)
    if found is None:
        return None
    return Traffic(found.num_requests, found.prompt_p99, found.output_max, found.max_at_once or None)


def _constant(value: Any) -> Provide:
    def provide() -> Any:
        return value

    return Provide(provide, sync_to_thread=False)


def _listen(settings: Settings) -> socket.socket:
    """Bind before anything else starts, so that a taken port is one sentence and not a log of errors."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise StartupError(
            f"Cannot listen on {settings.host} port {settings.port}: {reason}; choose another port with --port or "
            "QUIRE_PORT, or end the program that uses it."
        ) from error
    return listener
