"""What do a cache that grows, a model that sleeps and a model that wakes cost on a GPU?

    python benchmarks/residency_gpu.py --model DIR --load-format dummy [--part driver,cache,engine]

`driver` times the driver's calls by the size of a piece, `cache` a KV cache of a Llama of 8B between 0, 10 and
100 GiB, by how finely it is cut.  `engine` loads the model of DIR once for each kind of memory, mapped in pieces as
shipped, mapped in granules, and from torch's allocator, each in a process of its own, and compares their speed; with
the shipped one it also sleeps, wakes, and resizes the cache with requests in flight.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    # The checkout, not this folder, whose `profile.py` would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.offline import Driver, measure
from benchmarks.workloads import workload
from engine import LLM
from engine.api.request import Prompt
from engine.api.sampling import SamplingParams
from engine.attention.backend import CacheSpec
from engine.attention.mapped_cache import MappedCache
from engine.runner import device_arena
from engine.runner.cuda_driver import CudaDriver, cuda_driver_for

MIB, GIB = 2**20, 2**30
GPU = torch.device("cuda:0")
LLAMA_8B = CacheSpec(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16)
GRANULES = 10**9
"""A fineness at which no piece is larger than a granule."""
KINDS = {"mapped": None, "granules": GRANULES, "allocator": 0}
"""Kinds of memory: the fineness, None as shipped, 0 for torch's allocator."""
WORKLOADS = ("single_512_256", "burst64_512_256")
PROMPT_TOKENS = 128


def driver_or_exit() -> CudaDriver:
    driver = cuda_driver_for(GPU)
    if driver is None:
        raise SystemExit("This driver maps no memory under fixed addresses; there is nothing to measure.")
    return driver


def timed(action: Callable[..., object], *arguments: Any) -> float:
    """Seconds that `action` takes, the device's work included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    action(*arguments)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure_driver() -> dict[str, Any]:
    """Microseconds per call, medians over the pieces of 8 GiB (at most 256)."""
    driver = driver_or_exit()
    print(f"granule {driver.granule_bytes / MIB:.0f} MiB")
    print(f"{'piece MiB':>10}{'map us':>12}{'access us':>12}{'unmap us':>12}{'GiB/s':>12}")
    results = {}
    for piece_bytes in (2 * MIB, 8 * MIB, 32 * MIB, 128 * MIB, 512 * MIB, 1 * GIB):
        count = min(256, 8 * GIB // piece_bytes)
        address = driver.reserve(count * piece_bytes)
        places = [address + index * piece_bytes for index in range(count)]
        calls: dict[str, Callable[[int, int], None]] = {
            "map": driver.map_new,
            "access": driver.allow_access,
            "unmap": driver.unmap,
        }
        times = {
            name: 1e6 * statistics.median([timed(call, at, piece_bytes) for at in places])
            for name, call in calls.items()
        }
        driver.free(address, count * piece_bytes)
        rate = piece_bytes / GIB / (1e-6 * (times["map"] + times["access"]))
        results[str(piece_bytes // MIB)] = {name: round(value, 1) for name, value in times.items()}
        print(
            f"{piece_bytes // MIB:>10}{times['map']:>12.1f}{times['access']:>12.1f}{times['unmap']:>12.1f}{rate:>12.0f}"
        )
    return results


def measure_cache() -> dict[str, Any]:
    """Seconds to grow and to shrink a whole cache, zeros included."""
    driver = driver_or_exit()
    free = driver.free_bytes() - 2 * GIB
    sizes = [min(size * GIB, free) // LLAMA_8B.bytes_per_block for size in (10, 100)]
    print(f"{'fineness':>10}{'0-10 GiB s':>12}{'10-100 s':>12}{'100-10 s':>12}{'10-0 s':>12}{'pieces':>10}")
    results = {}
    for fineness in (4, 16, 32, 64, GRANULES):
        with patch.object(device_arena, "FINENESS", fineness):
            cache = MappedCache(LLAMA_8B, driver, 1, sizes[1])
            cache.resize(0)
            seconds = [timed(cache.resize, size) for size in sizes]
            num_pieces = sum(len(region._pieces) for region in cache._regions)
            seconds += [timed(cache.resize, size) for size in (sizes[0], 0)]
        name = "granules" if fineness == GRANULES else str(fineness)
        results[name] = {"seconds": [round(value, 3) for value in seconds], "pieces": num_pieces}
        print(f"{name:>10}" + "".join(f"{value:>12.3f}" for value in seconds) + f"{num_pieces:>10}", flush=True)
        del cache
        gc.collect()
    return results


@contextlib.contextmanager
def memory_of(kind: str) -> Iterator[None]:
    """Engines built inside have this kind of memory."""
    fineness = KINDS[kind]
    with contextlib.ExitStack() as stack:
        if fineness == 0:
            for module in ("engine.attention.triton_paged", "engine.runner.device_weights"):
                stack.enter_context(patch(f"{module}.cuda_driver_for", lambda device: None))
        elif fineness is not None:
            stack.enter_context(patch.object(device_arena, "FINENESS", fineness))
            stack.enter_context(patch("engine.runner.device_weights._LEAST_PIECE_BYTES", 0))
        yield


def first_token(engine: Any, sequence_id: int) -> None:
    """Compute a prompt and wait for its first token; the rest of the sequence is dropped."""
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    token_ids = tuple(range(sequence_id, sequence_id + PROMPT_TOKENS))
    engine.submit(Prompt(10**8 + sequence_id, token_ids, 4, sampling))
    while not any(output.token_ids for output in engine.step()):
        assert engine.has_work, "the prompt ended without a token"
    engine.abort(10**8 + sequence_id)
    while engine.has_work:
        engine.step()


def measure_sleep(llm: LLM, repeats: int) -> dict[str, Any]:
    """Seconds to sleep, to wake, and from the wake call to a first token; what a sleeper holds, in bytes."""
    engine, num_blocks = llm.engine, llm.facts.num_kv_blocks
    results: dict[str, list[float]] = {"sleep_s": [], "wake_s": [], "wake_to_first_token_s": [], "awake_first_s": []}
    held = 0
    for number in range(repeats):
        results["awake_first_s"].append(timed(first_token, engine, 3 + number))
        free = torch.cuda.mem_get_info()[0]
        results["sleep_s"].append(timed(engine.sleep))
        gained = torch.cuda.mem_get_info()[0] - free
        held = engine.memory().fixed_bytes
        started = time.perf_counter()
        engine.wake(num_blocks)
        results["wake_s"].append(time.perf_counter() - started)
        first_token(engine, 50 + number)
        results["wake_to_first_token_s"].append(time.perf_counter() - started)
    print(f"asleep: {gained / GIB:.2f} GiB given back, {held / GIB:.2f} GiB said to be held")
    for name, values in results.items():
        print(f"{name:24}" + "".join(f"{value:>10.3f}" for value in values))
    return {**{name: [round(value, 4) for value in values] for name, values in results.items()}, "held_bytes": held}


def measure_resize(llm: LLM) -> dict[str, Any]:
    """Seconds of each resize with 64 sequences in flight, and how many blocks it left."""
    engine, full = llm.engine, llm.facts.num_kv_blocks
    sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    for number in range(64):
        token_ids = tuple(1 + (number * 7 + place) % 1000 for place in range(512))
        engine.submit(Prompt(2 * 10**8 + number, token_ids, 400, sampling))
    results = []
    for wanted in (full // 2, full, full // 10, full * 3 // 10, full):
        for _ in range(40):
            assert not any(output.finish_reason == "error" for output in engine.step())
        started = time.perf_counter()
        got = engine.resize_cache(wanted).num_kv_blocks
        results.append({"wanted": wanted, "got": got, "seconds": round(time.perf_counter() - started, 4)})
        gib = got * llm.facts.kv_bytes_per_token * llm.facts.block_size / GIB
        print(f"resized under load to {got:,} blocks ({gib:.1f} GiB) in {results[-1]['seconds']:.3f} s")
    while engine.has_work:
        assert not any(output.finish_reason == "error" for output in engine.step())
    return {"resizes": results, "preemptions": engine.stats().preemptions_total}


def measure_engine(arguments: argparse.Namespace) -> dict[str, Any]:
    """One kind of memory, in this process."""
    with memory_of(arguments.kind):
        started = time.perf_counter()
        llm = LLM(
            arguments.model,
            load_format=arguments.load_format,
            device="cuda",
            max_model_len=arguments.max_model_len,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
        )
        load_s = time.perf_counter() - started
        gib = llm.facts.num_kv_tokens * llm.facts.kv_bytes_per_token / GIB
        print(f"[{arguments.kind}] loaded in {load_s:.1f} s: {gib:.1f} GiB of KV cache", flush=True)
        driver = Driver(llm, temperature=0.0)
        speeds = {name: measure(driver, workload(name), 1, arguments.repeats) for name in WORKLOADS}
        result: dict[str, Any] = {"load_s": round(load_s, 2), "kv_gib": round(gib, 1), "workloads": speeds}
        if arguments.kind == "mapped":
            result["sleep"] = measure_sleep(llm, arguments.repeats)
            result["resize"] = measure_resize(llm)
            result["workloads_after"] = {name: measure(driver, workload(name), 1, 1) for name in WORKLOADS}
    return result


def measure_engines(arguments: argparse.Namespace) -> dict[str, Any]:
    """Each kind of memory in a process of its own; then their speeds side by side."""
    results: dict[str, Any] = {}
    for kind in arguments.kinds:
        command = [sys.executable, __file__, *arguments.passed_on, "--kind", kind]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        *lines, last = ran.stdout.splitlines() or [""]
        print("\n".join(lines), flush=True)
        results[kind] = json.loads(last) if ran.returncode == 0 else {"failed": ran.returncode}
    print(f"{'memory':12}" + "".join(f"{f'{name} ms/token':>32}{'tok/s':>12}" for name in WORKLOADS))
    for kind, result in results.items():
        for label in ("workloads", "workloads_after"):
            if found := result.get(label):
                cells = (f"{run['ms_per_output_token']:>32}{run['output_tokens_per_s']:>12}" for run in found.values())
                print(f"{kind + (' *' if label.endswith('after') else ''):12}" + "".join(cells))
    print("* after sleeping, waking and resizing")
    return results


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Growing, shrinking, sleeping and waking on a GPU.")
    parser.add_argument("--model", help="directory or GGUF file, for the engine")
    parser.add_argument("--load-format", default="auto", choices=("auto", "safetensors", "gguf", "dummy"))
    parser.add_argument("--part", default="driver,cache,engine", help="comma-separated: driver, cache, engine")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated kinds of memory for the engine")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kind", choices=tuple(KINDS), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.kinds = arguments.kinds.split(",")
    arguments.passed_on = argv
    if arguments.model is None and "engine" in arguments.part:
        parser.error("the part engine needs --model")
    return arguments


def main() -> None:
    arguments = parse_arguments(sys.argv[1:])
    if arguments.kind is not None:
        print(json.dumps(measure_engine(arguments)))
        return
    parts = {"driver": measure_driver, "cache": measure_cache, "engine": lambda: measure_engines(arguments)}
    results = {name: measure_part() for name, measure_part in parts.items() if name in arguments.part.split(",")}
    print(json.dumps({"benchmark": "residency_gpu", "device": torch.cuda.get_device_name(0), **results}))


if __name__ == "__main__":
    main()
