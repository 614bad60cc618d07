"""Several models on one GPU: does the split hold, what does it cost, how fast do models wake and shares move?

    python benchmarks/residency.py --chat A --embedder B --second C --sleeper D

Starts a daemon of its own with `--load-format dummy` unless `--load-format auto` is given: directories with config.json
and a tokenizer are enough.  Prints five tables:

  split    all three loaded and asked at once: the device's memory against the sum of the budgets
  alone    throughput of the chat model with the others resident and idle, against alone
  resplit  the chat model's share moved down and up while it is asked: seconds, and failed requests
  sleep    a model put to sleep and woken: seconds, and the first token of a request that finds it asleep
  swap     two models of which one fits, asked in turn: the first token, while the other goes to sleep for it

The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The checkout, not this folder, whose `profile.py` would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import httpx
import pynvml

from benchmarks.http_load import RequestFailed, Target, closed_loop

GIB = 2**30
SHARES = {"chat": 0.5, "embedder": 0.1, "second": 0.3}
_SAMPLE_S = 0.02
_QUIET_S = 3.0
_PROCESSES = 4


class DeviceWatch:
    """The most that was in use of the first GPU while it watched, in bytes."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.total_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(self._gpu).total)
        self.peak_bytes = self.used_bytes
        self._ended = threading.Event()

    @property
    def used_bytes(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._gpu).used)

    def __enter__(self) -> DeviceWatch:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)


class Daemon:
    """A daemon of this benchmark's own, and what is asked of it."""

    def __init__(self, process: subprocess.Popen[bytes], base_url: str) -> None:
        self.process = process
        self.base_url = base_url
        self._client = httpx.Client(base_url=base_url, timeout=600.0)

    def call(self, path: str, **body: Any) -> tuple[float, Any]:
        """Seconds, and the answer, or its last line."""
        began_s = time.perf_counter()
        response = self._client.post(path, json=body)
        seconds = time.perf_counter() - began_s
        last = json.loads(response.text.strip().splitlines()[-1])
        if response.status_code >= 300 or "error" in last:
            raise RequestFailed(response.text)
        return seconds, last

    def models(self) -> list[dict[str, Any]]:
        return list(self._client.get("/api/ps").json()["models"])

    def is_up(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def first_token_s(self, model: str) -> float:
        """From sending a request to its first token."""
        body = {"model": model, "prompt": list(range(10, 522)), "max_tokens": 4, "ignore_eos": True, "stream": True}
        began_s, first_s = time.perf_counter(), 0.0
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and not first_s:
                    first_s = time.perf_counter() - began_s
        if not first_s:
            raise RequestFailed("no token came")
        return first_s


@contextmanager
def daemon(models: list[str], load_format: str, max_model_len: int, port: int) -> Iterator[Daemon]:
    """Run `quire serve` with the models of `models`, each `NAME=SHARE`, until it is left."""
    with tempfile.TemporaryDirectory() as directory:
        environment = {
            **os.environ,
            "QUIRE_HOME": os.environ.get("QUIRE_HOME", f"{directory}/home"),
            "QUIRE_STATE_DIR": f"{directory}/state",
            "QUIRE_CONFIG_DIR": f"{directory}/config",
            "QUIRE_LOAD_FORMAT": load_format,
            "QUIRE_MAX_MODEL_LEN": str(max_model_len),
        }
        command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port)]
        process = subprocess.Popen([*command, *(f"--model={model}" for model in models)], env=environment)
        try:
            running = Daemon(process, f"http://127.0.0.1:{port}")
            while not running.is_up():
                if process.poll() is not None:
                    raise RequestFailed(f"the daemon ended with exit code {process.returncode}")
                time.sleep(0.05)
            yield running
        finally:
            process.terminate()
            process.wait(30)


def wait_until_ready(running: Daemon, count: int, timeout_s: float = 300.0) -> float:
    """Seconds until so many models are ready."""
    began_s = time.perf_counter()
    while True:
        models = running.models()
        if sum(model["state"] == "ready" for model in models) == count:
            break
        late = time.perf_counter() - began_s > timeout_s
        if late or any(model["state"] == "failed" for model in models):
            raise RequestFailed(f"not all models are ready: {models}")
        time.sleep(0.1)
    return time.perf_counter() - began_s


def chat_rate(running: Daemon, model: str, streams: int, rounds: int, seed: int, output_len: int = 128) -> float:
    """Output tokens per second of a closed loop."""
    target = Target(running.base_url, model, 512, output_len, timeout_s=300.0)
    timings = closed_loop(target, streams, rounds, _PROCESSES, seed)
    elapsed_s = max(one.last_token_s for one in timings) - min(one.due_s for one in timings)
    return sum(one.num_tokens for one in timings) / elapsed_s


def embed_until(running: Daemon, model: str, ended: threading.Event, counts: dict[str, int]) -> None:
    """Batches of texts, one after the other, as token ids."""
    rng = random.Random(0)
    while not ended.is_set():
        batch = [[rng.randint(10, 10_000) for _ in range(rng.randint(5, 500))] for _ in range(32)]
        _, answer = running.call("/v1/embeddings", model=model, input=batch)
        counts["texts"] += len(answer["data"])


def in_background(count: int, *work: Any) -> tuple[list[threading.Thread], list[BaseException]]:
    """Start `work[0](*work[1:])` in so many threads; what they raise lands in the list."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work[0](*work[1:])
        except (RequestFailed, httpx.HTTPError, OSError) as error:
            failures.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, failures


def measure_split(running: Daemon, arguments: argparse.Namespace, before_bytes: int) -> dict[str, Any]:
    """All three asked at once; the budgets are shares of the device's total."""
    ended, counts = threading.Event(), {"texts": 0}
    with DeviceWatch() as watch:
        texts, failed_texts = in_background(2, embed_until, running, arguments.embedder, ended, counts)
        chats, failed_chats = in_background(1, chat_rate, running, arguments.second, 64, 3, 7)
        rate = chat_rate(running, arguments.chat, 64, 4, 5)
        for thread in chats:
            thread.join()
        ended.set()
        for thread in texts:
            thread.join()
    budgets = sum(SHARES.values()) * watch.total_bytes
    return {
        "before_gib": round(before_bytes / GIB, 2),
        "budgets_gib": round(budgets / GIB, 2),
        "peak_gib": round(watch.peak_bytes / GIB, 2),
        "above_budgets_gib": round((watch.peak_bytes - before_bytes - budgets) / GIB, 2),
        "chat_tokens_per_s": round(rate),
        "texts": counts["texts"],
        "failed": [repr(one)[:300] for one in (*failed_texts, *failed_chats)],
    }


def measure_alone(running: Daemon, arguments: argparse.Namespace) -> dict[str, Any]:
    """The chat model's rate beside two idle models, alone, and beside them once more; no prompt comes twice."""
    seeds = itertools.count(100)
    others = {arguments.embedder: SHARES["embedder"], arguments.second: SHARES["second"]}

    def rates() -> list[float]:
        # The first is a warm-up, and then there is a quiet moment, in which workers prepare what they lacked.
        chat_rate(running, arguments.chat, 64, 1, next(seeds))
        time.sleep(_QUIET_S)
        return [chat_rate(running, arguments.chat, 64, 3, next(seeds)) for _ in range(3)]

    beside = rates()
    for other in others:
        running.call("/api/stop", model=other)
    alone = rates()
    for other, share in others.items():
        running.call("/api/load", model=other, share=share)
    time.sleep(2 * _QUIET_S)
    beside += rates()
    ratio = statistics.median(beside) / statistics.median(alone)
    return {
        "beside_tokens_per_s": [round(rate) for rate in beside],
        "alone_tokens_per_s": [round(rate) for rate in alone],
        "ratio": round(ratio, 4),
    }


def measure_resplit(running: Daemon, arguments: argparse.Namespace) -> dict[str, Any]:
    """Shares moved while 64 streams run; `kv` are the tokens of the KV cache after each move."""
    load, failures = in_background(1, chat_rate, running, arguments.chat, 64, 6, 11, 256)
    time.sleep(1.0)
    seconds, tokens = [], []
    for share in (0.3, 0.5, 0.25, 0.5):
        seconds.append(round(running.call("/api/share", model=arguments.chat, share=share)[0], 3))
        tokens += [model["kv_cache_tokens"] for model in running.models() if model["name"] == arguments.chat]
        time.sleep(0.3)
    was_running = load[0].is_alive()
    load[0].join()
    return {
        "seconds": seconds,
        "kv_tokens": tokens,
        "under_load": was_running,
        "failed": [repr(one)[:300] for one in failures],
    }


def measure_sleep(running: Daemon, arguments: argparse.Namespace, watch: DeviceWatch) -> dict[str, Any]:
    """Sleep and wake by hand, then by a request."""
    name = arguments.sleeper
    running.call("/api/load", model=name, share=0.5)
    running.first_token_s(name)
    time.sleep(3.0)
    sleeps, wakes, firsts, held = [], [], [], []
    for _ in range(2):
        sleeps.append(round(running.call("/api/sleep", model=name)[0], 3))
        held.append(round(watch.used_bytes / GIB, 2))
        wakes.append(round(running.call("/api/wake", model=name)[0], 3))
        warm = running.first_token_s(name)
    for _ in range(3):
        running.call("/api/sleep", model=name)
        firsts.append(round(running.first_token_s(name), 3))
    return {
        "sleep_s": sleeps,
        "in_use_asleep_gib": held,
        "wake_s": wakes,
        "first_token_from_sleep_s": firsts,
        "first_token_awake_s": round(warm, 3),
    }


def measure_swap(running: Daemon, arguments: argparse.Namespace) -> dict[str, Any]:
    """First tokens of two models that want 0.6 of the device each, asked in turn."""
    names = (arguments.chat, arguments.sleeper)
    for name in names:
        running.call("/api/load", model=name, share=0.6)
    firsts: dict[str, list[float]] = {name: [] for name in names}
    states = set()
    for _ in range(3):
        for name in names:
            firsts[name].append(round(running.first_token_s(name), 3))
            states.add(tuple(sorted(model["state"] for model in running.models())))
            time.sleep(0.5)
    return {"first_token_s": list(firsts.values()), "states": sorted(states)}


def show(title: str, rows: dict[str, Any]) -> dict[str, Any]:
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:28}{value!s:>40}", flush=True)
    return rows


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Several models on one GPU.")
    parser.add_argument("--chat", required=True)
    parser.add_argument("--embedder", required=True)
    parser.add_argument("--second", required=True)
    parser.add_argument("--sleeper", required=True)
    parser.add_argument("--load-format", default="dummy", choices=("auto", "dummy"))
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--port", type=int, default=11999)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    watch = DeviceWatch()
    before_bytes = watch.used_bytes
    models = [f"{getattr(arguments, role)}={share}" for role, share in SHARES.items()]
    results: dict[str, Any] = {}
    with daemon(models, arguments.load_format, arguments.max_model_len, arguments.port) as running:
        results["ready_s"] = round(wait_until_ready(running, len(models)), 2)
        print(f"three models ready after {results['ready_s']} s")
        results["split"] = show("split", measure_split(running, arguments, before_bytes))
        results["alone"] = show("alone", measure_alone(running, arguments))
        results["resplit"] = show("resplit", measure_resplit(running, arguments))
        for name in (arguments.chat, arguments.embedder, arguments.second):
            running.call("/api/stop", model=name)
        results["sleep"] = show("sleep", measure_sleep(running, arguments, watch))
        results["swap"] = show("swap", measure_swap(running, arguments))
    print(json.dumps({"benchmark": "residency", **results}))


if __name__ == "__main__":
    main()
