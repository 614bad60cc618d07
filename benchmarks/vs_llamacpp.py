"""Is Quire ahead of llama.cpp on these cores?  Both in one run, in turns, on the same file and threads.

    python benchmarks/vs_llamacpp.py --model FILE.gguf [--threads 2] [--repeats 5] [--llama-python PYTHON]

Quire and llama.cpp each run in a child process of their own, and both stay loaded: a child that is not
asked computes nothing, which is checked, as is what other programs take meanwhile.  Every repeat goes
through all tasks, on new token ids that both get alike, and the order of the two is swapped each time.
llama.cpp comes from the `llama-cpp-python` package of the interpreter `--llama-python`, or from a
`--llama-server` or `--llama-bench` binary (the latter measures prompts and one sequence only).

Tasks: `prompt_N` (tokens/s until the first token of a prompt of N), `first_token_N` (the seconds of that),
`generate_N` (tokens/s of N sequences of 64 + 128 tokens while all of them decode).  Load time and memory come
from fresh processes with room for 16 sequences of 256 tokens, in turns too, after one that fills the page cache
and Quire's data root; imports are counted apart, and both have computed a first token when they count as
loaded.  Memory is the peak of resident pages, mapped files included, through loading and generating 16
sequences; "beyond KV" subtracts the KV cache's resident part: llama.cpp's whole cache, which it clears when
it makes it, and what Quire has touched of its pool.

Ratios are of medians; the range is that of single repeats, and `best` is the ratio of both sides' best
figures: on a busy machine the one to look at, since llama.cpp's threads wait for each other in a loop and lose
more to other processes than to themselves.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The checkout, not this folder, whose `profile.py` would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import psutil

from benchmarks.llamacpp import bench_binary
from benchmarks.llamacpp.child import Child, ChildFailed
from benchmarks.llamacpp.report import Row, table
from benchmarks.llamacpp.tasks import Task, overall_rate, parse_task

TASKS = "prompt_512,generate_1,generate_4,generate_8,generate_16,generate_32,first_token_1000"
WARM_UP_TOKENS = 4
WARM_UP_REPEAT = 10**6
"""Far from the number of any repeat, whose prompts these are not."""
FRESH_SHAPE = (16, 256)
"""Sequences and tokens of each that a fresh process is loaded for: a context of 4,096 tokens."""
FRESH_TASK = parse_task(f"generate_{FRESH_SHAPE[0]}", generate_tokens=32)
"""What its peak memory is read after: prompts of 1,024 tokens in all, and a decode of all sequences."""
READ_BYTES = 2**22
REST_S = 0.05
"""Between runs, so that the threads of the one before have gone to sleep."""
IDLE_LIMIT = 0.01
"""CPU seconds per second that a waiting contender may take."""
OTHERS_LIMIT = 0.2
"""CPU seconds per second that other programs may take in half of the runs."""


class Contender:
    """One loaded child and what it has said about itself."""

    def __init__(self, name: str, child: Child, arguments: dict[str, Any]) -> None:
        self.name = name
        self._child = child
        self.loaded: dict[str, Any] = child.ask("load", **arguments)

    def arrivals(self, task: Task, repeat: int, vocab_size: int, max_tokens: int | None = None) -> list[list[float]]:
        requests = task.requests(repeat, vocab_size)
        prompts = [request.token_ids for request in requests]
        found: list[list[float]] = self._child.ask("run", prompts=prompts, max_tokens=max_tokens or task.max_tokens)
        return found

    def usage(self) -> dict[str, float]:
        used: dict[str, float] = self._child.ask("usage")
        return used


@dataclass
class Figures:
    """What has been measured so far: figures by task and contender, in the order of repeats.

    `idle` is the largest share of a core that each took while it waited, `others` what other programs took in each run.
    """

    tasks: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    overall: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=lambda: {"quire": 0.0, "llamacpp": 0.0})
    others: list[float] = field(default_factory=list)

    def add(self, name: str, task: Task, arrivals: list[list[float]]) -> float:
        figure = task.figure(arrivals)
        self.tasks.setdefault(task.name, {}).setdefault(name, []).append(figure)
        if task.name.startswith("generate"):
            self.overall.setdefault(task.name, {}).setdefault(name, []).append(overall_rate(arrivals))
        return figure


class Bench:
    """Starts contenders as the command line says and lets them take turns."""

    def __init__(self, arguments: argparse.Namespace, data_root: Path) -> None:
        self._arguments = arguments
        self._data_root = data_root
        self._names = ("quire",) if arguments.llama_bench else ("quire", "llamacpp")

    @contextlib.contextmanager
    def contender(self, name: str, shapes: Sequence[tuple[int, int]]) -> Iterator[Contender]:
        """A fresh process with the model loaded for these numbers of sequences and tokens of each."""
        arguments = self._arguments
        options = {"model": str(Path(arguments.model).resolve()), "threads": arguments.threads, "shapes": shapes}
        if name == "quire":
            child = Child(sys.executable, "benchmarks.llamacpp.quire_child", {"QUIRE_HOME": str(self._data_root)})
            given = {"dtype": arguments.dtype, "quantization": arguments.quantization}
            options |= {key: value for key, value in given.items() if value is not None}
        elif arguments.llama_server:
            child = Child(sys.executable, "benchmarks.llamacpp.server_child")
            options["server"] = arguments.llama_server
        else:
            child = Child(arguments.llama_python, "benchmarks.llamacpp.python_child")
        with child:
            yield Contender(name, child, options)

    def loads(self) -> dict[str, list[dict[str, Any]]]:
        """Load times and memory of fresh processes by contender; the first of each, into cold caches, is left out."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self._names}
        for repeat in range(-1, self._arguments.load_repeats):
            for name in self._in_turn(repeat):
                result = self._load_once(name)
                if repeat >= 0:
                    found[name].append(result)
        return found

    def _load_once(self, name: str) -> dict[str, Any]:
        # A system that is short of memory, or proactive, forgets files that have not been read for a while.
        keep_in_page_cache([Path(self._arguments.model), *self._data_root.rglob("*")])
        with self.contender(name, [FRESH_SHAPE]) as contender:
            usages = [contender.usage()]
            contender.arrivals(FRESH_TASK, 0, contender.loaded["vocab_size"])
            usages.append(contender.usage())
            return {**contender.loaded, **memory(usages)}

    def speeds(self, tasks: Sequence[Task]) -> tuple[Figures, dict[str, Any]]:
        """The figures of every task and repeat, and what each contender says about itself."""
        shapes = [(count, max(task.length for task in tasks if task.num_sequences == count))
                  for count in sorted({task.num_sequences for task in tasks})]  # fmt: skip
        figures = Figures()
        with contextlib.ExitStack() as stack:
            loaded = {name: stack.enter_context(self.contender(name, shapes)) for name in self._names}
            vocab_size = loaded["quire"].loaded["vocab_size"]
            for task in tasks:
                for contender in loaded.values():
                    contender.arrivals(task, WARM_UP_REPEAT, vocab_size, min(WARM_UP_TOKENS, task.max_tokens))
            for repeat in range(self._arguments.repeats):
                for index, task in enumerate(tasks):
                    self._take_turns(figures, loaded, task, repeat, repeat + index, vocab_size)
            return figures, {name: contender.loaded["details"] for name, contender in loaded.items()}

    def _take_turns(
        self, figures: Figures, loaded: dict[str, Contender], task: Task, repeat: int, turn: int, vocab_size: int
    ) -> None:
        said = [f"repeat {repeat + 1}: {task.name}"]
        for name in self._in_turn(turn):
            time.sleep(REST_S)
            before = {each.name: each.usage()["cpu_s"] for each in loaded.values()}
            busy_s, started = machine_cpu_s(), time.perf_counter()
            figure = figures.add(name, task, loaded[name].arrivals(task, repeat, vocab_size))
            took = time.perf_counter() - started
            busy_s = machine_cpu_s() - busy_s
            used = {each.name: each.usage()["cpu_s"] - before[each.name] for each in loaded.values()}
            figures.others.append(max(0.0, busy_s - sum(used.values())) / took)
            for other in used.keys() - {name}:
                figures.idle[other] = max(figures.idle[other], used[other] / took)
            said.append(f"{name} {figure:,.4g}")
        if self._arguments.llama_bench and bench_binary.can_measure(task):
            arguments = self._arguments
            figure = bench_binary.measure(arguments.llama_bench, arguments.model, arguments.threads, task)
            figures.tasks[task.name].setdefault("llamacpp", []).append(figure)
            said.append(f"llama-bench {figure:,.4g}")
        print(", ".join(said), task.unit, flush=True)

    def _in_turn(self, turn: int) -> tuple[str, ...]:
        return self._names if turn % 2 == 0 else self._names[::-1]


def keep_in_page_cache(paths: Iterable[Path]) -> None:
    """Read files to their ends, so that whoever reads them next need not wait for the disk."""
    for path in paths:
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(READ_BYTES):
                    pass


def machine_cpu_s() -> float:
    """CPU seconds that all programs of this machine have used since it was started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def memory(usages: Sequence[dict[str, float]]) -> dict[str, float]:
    """Peak bytes in all, and the most beyond the KV cache at any of these moments.

    The cache is subtracted as large as it was when the peak was read: a peak from before the cache was filled is not
    made smaller by what the cache has grown to since.
    """
    return {
        "peak_bytes": usages[-1]["peak_bytes"],
        "beyond_kv_bytes": max(used["peak_bytes"] - used["kv_bytes"] for used in usages),
        "kv_bytes": usages[-1]["kv_bytes"],
    }


def rows_of(figures: Figures, loads: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """One row for each measure that both contenders have."""
    rows = []
    for name, found in figures.tasks.items():
        if "llamacpp" in found:
            unit = parse_task(name).unit
            rows.append(Row(name, unit, tuple(found["quire"]), tuple(found["llamacpp"])))
    if loads.get("llamacpp"):
        for name, key, unit, scale in (
            ("load", "load_s", "s", 1.0),
            ("import", "import_s", "s", 1.0),
            ("peak memory", "peak_bytes", "MiB", 2.0**-20),
            ("peak memory beyond KV", "beyond_kv_bytes", "MiB", 2.0**-20),
        ):
            quire, llamacpp = (tuple(scale * load[key] for load in loads[side]) for side in ("quire", "llamacpp"))
            if all(quire + llamacpp):
                rows.append(Row(name, unit, quire, llamacpp))
    return rows


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    tasks = arguments.tasks
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(arguments, Path(arguments.data_root or temporary).resolve())
        loads = bench.loads() if arguments.load_repeats else {}
        figures, details = bench.speeds(tasks)
    rows = rows_of(figures, loads)
    print(table(rows))
    others = statistics.median(figures.others)
    if others > OTHERS_LIMIT:
        print(f"warning: other programs took {100 * others:.0f} % of a core; do not trust this run")
    for name, share in figures.idle.items():
        if share > IDLE_LIMIT:
            print(
                f"warning: {name} took {100 * share:.0f} % of a core while it should have waited; do not trust this run"
            )
    return {
        "benchmark": "vs_llamacpp",
        "model": arguments.model,
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "idle_cpu_share": {name: round(share, 4) for name, share in figures.idle.items()},
        "others_cpu_share": {"median": round(others, 3), "max": round(max(figures.others), 3)},
        "rows": {row.name: row.as_json() for row in rows},
        "overall_tokens_per_s": figures.overall,
        "loads": loads,
        "contenders": details,
    }


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quire against llama.cpp, in turns, on the same file and threads.")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--load-repeats", type=int, default=5, help="fresh processes of each; 0 leaves them out")
    parser.add_argument("--tasks", default=TASKS, help="comma-separated: prompt_N, generate_N, first_token_N")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each sequence that generates")
    parser.add_argument("--generate-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="Quire's")
    parser.add_argument("--quantization", help="Quire's")
    parser.add_argument("--data-root", help="Quire's, where it keeps what it has prepared; else a temporary one")
    opponent = parser.add_mutually_exclusive_group()
    opponent.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama-cpp-python")
    opponent.add_argument("--llama-server", help="path of the binary")
    opponent.add_argument("--llama-bench", help="path of the binary")
    arguments = parser.parse_args(argv)
    sizes = {"generate_prompt_tokens": arguments.prompt_tokens, "generate_tokens": arguments.generate_tokens}
    try:
        arguments.tasks = [parse_task(name, **sizes) for name in arguments.tasks.split(",")]
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    try:
        print(json.dumps(measure(parse_arguments())))
    except ChildFailed as error:
        sys.exit(f"vs_llamacpp: {error}")


if __name__ == "__main__":
    main()
