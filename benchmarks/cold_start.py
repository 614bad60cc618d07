"""How long from the start of a process to its first token, and where does the time go?

    python benchmarks/cold_start.py --model DIR [--load-format dummy] [--kernel-cache DIR]

Starts a fresh Python several times: first with empty kernel caches, then `--warm-runs` times with
what the ones before have left, the graphs that they prepared while idle included.  The caches of
Triton and of the driver and the data root are put under `--kernel-cache` (a temporary directory
unless given; one that is not empty has no empty run).  Weights are read through the page cache,
so the first run may also pay for the disk.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]

CHILD = """
import json, sys, time
spawned_s, options = float(sys.argv[1]), json.loads(sys.argv[2])
marks = [("python", time.time())]
mark = lambda name: marks.append((name, time.time()))
import torch
mark("import torch")
from engine import LLM, SamplingParams
mark("import engine")
if options["device"] != "cpu" and torch.cuda.is_available():
    torch.zeros(1, device="cuda").item()
mark("device init")
stages = []
def on_progress(stage, done, total):
    if not stages or stages[-1][0] != stage:
        stages.append((stage, time.time()))
prompt = options.pop("prompt")
llm = LLM(on_progress=on_progress, **options)
for (stage, _), following in zip(stages, [at for _, at in stages[1:]] + [time.time()]):
    marks.append((stage, following))
one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
llm.generate([prompt], one)
mark("first request")
ready_s = marks[-1][1]
again = time.time()
llm.generate([[token_id + 1 for token_id in prompt]], one)
again = time.time() - again
while llm.engine.has_spare_work:
    llm.engine.spare_step()
begins = [spawned_s] + [at for _, at in marks]
phases = {name: at - begin for (name, at), begin in zip(marks, begins)}
print(json.dumps({"total_s": ready_s - spawned_s, "phases": phases, "second_request_s": again}))
"""


def start_once(arguments: argparse.Namespace, caches: Path) -> dict[str, Any]:
    """One fresh process; seconds by phase.  Raises `RuntimeError` with what it said if it fails."""
    options = {
        "model": str(Path(arguments.model).resolve()),
        "load_format": arguments.load_format,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "max_model_len": arguments.max_model_len,
        "max_num_seqs": arguments.max_num_seqs,
        "prompt": [10 + i % 100 for i in range(arguments.prompt_len)],
    }
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "CUDA_CACHE_PATH": str(caches / "cuda"),
        "QUIRE_HOME": str(caches / "home"),
    }
    command = [sys.executable, "-P", "-c", CHILD, repr(time.time()), json.dumps(options)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=arguments.timeout)
    if process.returncode != 0:
        raise RuntimeError(f"the process failed:\n{process.stderr}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Results by name of the run, in order."""
    with tempfile.TemporaryDirectory() as temporary:
        caches = Path(arguments.kernel_cache or temporary).resolve()
        caches.mkdir(parents=True, exist_ok=True)
        names = [] if any(caches.iterdir()) else ["empty"]
        names += [f"warm {number + 1}" for number in range(arguments.warm_runs)]
        return {name: start_once(arguments, caches) for name in names}


def print_table(results: dict[str, dict[str, Any]]) -> None:
    phases = list(dict.fromkeys(name for result in results.values() for name in result["phases"]))
    print(f"{'seconds':28}" + "".join(f"{name:>10}" for name in results))
    for phase in phases:
        print(f"{phase:28}" + "".join(f"{result['phases'].get(phase, 0.0):10.2f}" for result in results.values()))
    print(f"{'start to first token':28}" + "".join(f"{result['total_s']:10.2f}" for result in results.values()))
    print(f"{'the next request':28}" + "".join(f"{result['second_request_s']:10.3f}" for result in results.values()))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Process start to first token, with kernel caches empty and warm.")
    parser.add_argument("--model", required=True, help="directory or GGUF file")
    parser.add_argument("--load-format", default="auto", choices=("auto", "safetensors", "gguf", "dummy"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--kernel-cache", help="where the caches go, and stay")
    parser.add_argument("--warm-runs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one start")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    results = measure(arguments)
    print_table(results)
    rounded = {
        name: {
            "total_s": round(result["total_s"], 3),
            "phases": {phase: round(seconds, 3) for phase, seconds in result["phases"].items()},
            "second_request_s": round(result["second_request_s"], 4),
        }
        for name, result in results.items()
    }
    print(json.dumps({"benchmark": "cold_start", "model": arguments.model, "runs": rounded}))


if __name__ == "__main__":
    main()
