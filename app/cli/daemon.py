"""`quire serve` and `quire shutdown`: the daemon itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.connection import find_client
from app.cli.failure import CommandFailure
from app.cli.jobs import unfinished_jobs
from app.cli.output import notice

if TYPE_CHECKING:
    from app.settings import Settings

SHUTDOWN_TIMEOUT_S = 15.0
_POLL_INTERVAL_S = 0.05


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 unless set.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 11435 unless set.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Directory for models, downloads and logs.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest context, in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences computed at once, per model.")] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME[=SHARE]",
            help="A model to load at start, and its share of the memory; may be given again.",
        ),
    ] = None,
    memory_limit: Annotated[
        float | None, typer.Option(help="Share of each device that all models together may take; 0.92 unless set.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a device for each model that has none of its own.")
    ] = None,
    keep_alive: Annotated[
        str | None, typer.Option(help="How long an idle model stays, like 30m or 1h30m; -1 for ever.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Weights on a CPU: auto (as the file has them), int8 or none.")
    ] = None,
    num_threads: Annotated[int | None, typer.Option(help="CPU threads of a model; one per core unless set.")] = None,
) -> None:
    """Run the daemon in the foreground.

    `quire run` and `quire pull` start one in the background when needed.
    """
    from app.cli.first_run import settle_data_root
    from app.server import serve as serve_forever
    from app.settings import load_settings

    flags = {
        "host": host,
        "port": port,
        "data_root": data_root,
        "log_level": log_level,
        "device": device,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "residents": models or None,
        "memory_limit": memory_limit,
        "gpu_memory_utilization": gpu_memory_utilization,
        "keep_alive": keep_alive,
        "quantization": quantization,
        "num_threads": num_threads,
    }
    serve_forever(settle_data_root(load_settings(flags)))


def shutdown() -> None:
    """Stop the daemon and its models."""
    from app.settings import load_settings

    if not stop_daemon(load_settings()):
        notice("No daemon is running.")
        return
    notice("The daemon has stopped.")
    if waiting := [saved.request.model for saved in unfinished_jobs()]:
        notice(f"Downloads that wait to go on: {', '.join(waiting)}; `quire pull NAME` does it.")


def stop_daemon(settings: Settings) -> bool:
    """Stop the running daemon and wait until it has let go of everything; False if there is none."""
    import asyncio

    from app.daemon import running_daemon
    from app.instance import read_record
    from store.paths import DataRoot, user_paths

    client = find_client(settings)
    if client is None:
        return False

    async def ask() -> None:
        async with client:
            await client.shutdown()

    record = read_record(user_paths().state_dir)
    asyncio.run(ask())
    deadline_s = time.monotonic() + SHUTDOWN_TIMEOUT_S
    # It answers no more a little before its locks are free, and then removes its record.
    while running_daemon(settings) is not None or (record and record == read_record(user_paths().state_dir)):
        if time.monotonic() > deadline_s:
            log = DataRoot(settings.data_root).logs / "daemon.log"
            raise CommandFailure(f"The daemon still runs after {SHUTDOWN_TIMEOUT_S:.0f} s; see {log}.")
        time.sleep(_POLL_INTERVAL_S)
    return True
