"""Do several models share one GPU as they were told?  Workers with a share each, alone, together, resized, asleep.

    python benchmarks/shared_gpu.py --resident DIR=0.5 --resident DIR=0.1 --resident DIR=0.3 --load-format dummy

Starts one worker process for each model, as the daemon does.  The first is measured alone and again with the others
idle beside it; then all have requests at once while the device's memory is sampled, and half of the last one's KV cache
goes to the first and back; then the last one sleeps and wakes, with the others at work.  Embedding models pool, the
others generate.  The last line is JSON; the exit code is 1 after a failed request or more memory than allowed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The checkout, not this folder, whose `profile.py` would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import zmq.asyncio

from app.residency.worker_client import WorkerClient
from benchmarks.device_memory import MemorySampler
from benchmarks.workloads import repeated, shrunk, workload
from engine.api.config import EngineConfig
from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from engine.api.wire import WorkerFacts, WorkerMemory

REPOSITORY = Path(__file__).resolve().parents[1]
GIB = 2**30
ALONE = "burst64_512_256"
SLACK_BYTES = GIB
"""What all workers together may hold beyond the sum of their budgets."""
START_TIMEOUT_S = 180.0
_OPEN_REQUESTS = 48


@dataclass(eq=False)
class Resident:
    """One model in a worker of its own, and what became of its requests."""

    name: str
    share: float
    client: WorkerClient
    facts: WorkerFacts
    budget_bytes: int
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def embeds(self) -> bool:
        return self.facts.task != "generate"

    def prompt(self, token_ids: tuple[int, ...], max_tokens: int) -> Prompt:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        pooling = Pooling("embed") if self.embeds else None
        return Prompt(self.client.next_sequence_id(), token_ids, max_tokens, sampling, pooling=pooling)

    async def answer(self, prompt: Prompt) -> float:
        """Wait for the whole answer; returns the seconds until its first output."""
        started, first_s = time.perf_counter(), 0.0
        mailbox = self.client.submit([prompt])
        while True:
            for output in await mailbox.take():
                first_s = first_s or time.perf_counter() - started
                self.counts["tokens"] += len(output.token_ids)
                if output.finish_reason is not None:
                    is_good = output.finish_reason in ("length", "stop")
                    self.counts["answers" if is_good else "errors"] += 1
                    if not is_good:
                        print(f"{self.name}: {output.error_message}", file=sys.stderr)
                    return first_s

    async def burst(self, repeat: int, shrink: int) -> float:
        """Output tokens per second of one burst; of an embedding model, prompts per second."""
        requests = repeated(shrunk(workload(ALONE), shrink), repeat, self.facts.vocab_size)
        before, started = self.counts["tokens"], time.perf_counter()
        await asyncio.gather(*(self.answer(self.prompt(one.token_ids, one.max_tokens)) for one in requests))
        amount = len(requests) if self.embeds else self.counts["tokens"] - before
        return amount / (time.perf_counter() - started)

    async def keep_busy(self, seed: int, shrink: int) -> None:
        """Ask one thing after the other until cancelled."""
        rng = random.Random(seed)
        while True:
            length = rng.randint(16, 1024) // shrink + 1
            token_ids = tuple(rng.randrange(3, self.facts.vocab_size) for _ in range(length))
            await self.answer(self.prompt(token_ids, rng.randint(16, 512) // shrink + 1))


async def start(
    context: zmq.asyncio.Context, folder: Path, model: str, share: float, arguments: argparse.Namespace
) -> Resident:
    total_bytes = torch.cuda.get_device_properties(0).total_memory if arguments.device == "cuda" else 8 * GIB
    client = WorkerClient(context, folder)
    config = EngineConfig(
        model=model,
        load_format=arguments.load_format,
        device=arguments.device,
        memory_budget_bytes=int(total_bytes * share),
        max_model_len=arguments.max_model_len,
        cache_dir=arguments.cache_dir,
    )
    name = f"{Path(model).name}={share}"
    facts = await client.start(
        [sys.executable, "-P", "-m", "engine.worker"],
        {"PYTHONPATH": f"{REPOSITORY}:{':'.join(filter(None, sys.path))}"},
        folder / f"{Path(model).name}-{share}.log",
        config,
        timeout_s=START_TIMEOUT_S,
        on_progress=lambda progress: None,
    )
    fixed, cache = facts.fixed_bytes / GIB, facts.num_kv_tokens * facts.kv_bytes_per_token / GIB
    print(
        f"{name}: {facts.task}, fixed {fixed:.2f} GiB, KV cache {cache:.2f} GiB, loaded in {facts.load_seconds:.1f} s"
    )
    return Resident(name, share, client, facts, int(total_bytes * share))


async def resize(resident: Resident, num_blocks: int) -> tuple[float, WorkerMemory]:
    started = time.perf_counter()
    memory = await resident.client.resize_cache(num_blocks)
    seconds = time.perf_counter() - started
    print(f"{resident.name}: {memory.num_kv_blocks:,} blocks of {num_blocks:,} asked for, in {seconds:.3f} s")
    return seconds, memory


async def move_memory(giver: Resident, taker: Resident) -> list[float]:
    """Half of the giver's cache goes to the taker, and back; seconds of each whole move."""
    given_bytes = giver.facts.num_kv_tokens * giver.facts.kv_bytes_per_token // 2
    taken_blocks = given_bytes // (taker.facts.kv_bytes_per_token * taker.facts.block_size)
    moves = (
        ((giver, giver.facts.num_kv_blocks // 2), (taker, taker.facts.num_kv_blocks + taken_blocks)),
        ((taker, taker.facts.num_kv_blocks), (giver, giver.facts.num_kv_blocks)),
    )
    seconds = []
    for shrink, grow in moves:
        seconds.append((await resize(*shrink))[0] + (await resize(*grow))[0])
        await asyncio.sleep(2.0)
    return seconds


async def sleep_and_wake(resident: Resident, repeats: int) -> dict[str, Any]:
    """Seconds to sleep, to wake, and from the wake call to a first token, with the others at work."""
    times: dict[str, list[float]] = {"sleep_s": [], "wake_s": [], "wake_to_first_token_s": []}
    held_bytes = 0
    for number in range(repeats):
        started = time.perf_counter()
        held_bytes = (await resident.client.sleep()).fixed_bytes
        times["sleep_s"].append(time.perf_counter() - started)
        await asyncio.sleep(0.5)
        started = time.perf_counter()
        await resident.client.wake(resident.facts.num_kv_blocks)
        times["wake_s"].append(time.perf_counter() - started)
        first_s = await resident.answer(resident.prompt(tuple(range(10 + number, 138 + number)), 2))
        times["wake_to_first_token_s"].append(times["wake_s"][-1] + first_s)
    for name, values in times.items():
        print(f"{resident.name}: {name:24}" + "".join(f"{value:>9.3f}" for value in values))
    return {**{name: [round(value, 4) for value in values] for name, values in times.items()}, "held_bytes": held_bytes}


async def measure(arguments: argparse.Namespace, folder: Path, sampler: MemorySampler | None) -> dict[str, Any]:
    context = zmq.asyncio.Context()
    residents: list[Resident] = []
    result: dict[str, Any] = {}

    repeats = itertools.count()

    async def bursts() -> float:
        rates = [await residents[0].burst(next(repeats), arguments.shrink) for _ in range(arguments.repeats + 1)]
        return statistics.median(rates[1:])

    try:
        for model, share in arguments.resident:
            residents.append(await start(context, folder, model, share, arguments))
            if len(residents) == 1:
                result["alone_per_s"] = round(await bursts(), 1)
        result["beside_idle_per_s"] = round(await bursts(), 1)
        print(f"{residents[0].name}: {result['alone_per_s']}/s alone, {result['beside_idle_per_s']}/s beside idle ones")

        last = residents[-1]
        tasks = {one: keep_busy(one, arguments) for one in residents}
        await asyncio.sleep(arguments.seconds)
        result["moves_s"] = [round(value, 3) for value in await move_memory(last, residents[0])]
        await stop(tasks.pop(last), last)
        result["sleep"] = await sleep_and_wake(last, arguments.repeats)
        for one, running in tasks.items():
            await stop(running, one)
        result["counts"] = {one.name: dict(one.counts) for one in residents}
        result["errors"] = sum(one.counts["errors"] for one in residents)
        if sampler is not None:
            result["memory"] = check_memory(sampler, sum(one.budget_bytes for one in residents))
    finally:
        for one in residents:
            await one.client.close(10.0)
        context.term()
    return result


def keep_busy(resident: Resident, arguments: argparse.Namespace) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(resident.keep_busy(seed, arguments.shrink)) for seed in range(_OPEN_REQUESTS)]


async def stop(tasks: list[asyncio.Task[None]], resident: Resident) -> None:
    """End the tasks and what they have asked for."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    resident.client.abort(list(resident.client._outputs))


def check_memory(sampler: MemorySampler, budget_bytes: int) -> dict[str, Any]:
    sampler.report(1.0)
    own_bytes = sampler.peak_bytes - sampler.before_bytes
    is_within = own_bytes <= budget_bytes + SLACK_BYTES
    print(
        f"device memory: peak {own_bytes / GIB:.2f} GiB beyond the {sampler.before_bytes / GIB:.2f} before, "
        f"{'within' if is_within else 'ABOVE'} the budgets of {budget_bytes / GIB:.2f} GiB together"
    )
    return {"peak_bytes": own_bytes, "budget_bytes": budget_bytes, "is_within": is_within}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Several models on one GPU, with a share of its memory each.")
    parser.add_argument("--resident", action="append", type=_resident, required=True, metavar="DIR=SHARE")
    parser.add_argument("--load-format", default="auto", choices=("auto", "safetensors", "gguf", "dummy"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=15.0, help="of requests to all models before memory moves")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shrink", type=int, default=1, help="divide counts and lengths by this, to try the script")
    parser.add_argument("--cache-dir", help="where compiled kernels are kept")
    return parser.parse_args(argv)


def _resident(text: str) -> tuple[str, float]:
    model, _, share = text.rpartition("=")
    return str(Path(model).resolve()), float(share)


def main() -> int:
    arguments = parse_arguments()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-")))
        sampler = None
        if arguments.device == "cuda":
            sampler = stack.enter_context(MemorySampler(torch.device("cuda", 0)))
        try:
            result = asyncio.run(measure(arguments, folder, sampler))
        except Exception:
            for log in folder.glob("*.log"):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
            raise
    print(json.dumps({"benchmark": "shared_gpu", **result}))
    return int(bool(result["errors"]) or not result.get("memory", {}).get("is_within", True))


if __name__ == "__main__":
    sys.exit(main())
