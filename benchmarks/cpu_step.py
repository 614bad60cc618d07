"""Where a decode step on the CPU spends its time: kernels by kind, and the host around them.

    python benchmarks/cpu_step.py --model FILE.gguf --sequences 1,16 --context 500

Runs a batch of sequences that only decode, and splits the wall time of a step: each kind of kernel by the
processor's cycle counter (the wait for the slower thread included), then scheduling, describing the step to the
program, sampling, and committing.  Prints milliseconds a step and the share of each; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from steady_decode import SteadyDecode, rehearse

from engine import LLM
from engine.runner.recorded_steps import RecordedSteps

_KINDS = {
    "matrix": "products",
    "norm_pack": "norms, gates, packing",
    "gate_pack": "norms, gates, packing",
    "pack": "norms, gates, packing",
}


class Stopwatch:
    """Adds up the time spent in functions that are replaced by timed ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def around(self, owner: Any, name: str, label: str) -> None:
        """Time every call of `owner.name` from now on."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[label] += time.perf_counter() - started

        setattr(owner, name, timed)


def measure(llm: LLM, batch: int, context: int, steps: int, first_id: int) -> dict[str, float]:
    """Milliseconds a step by part, "step" being the whole."""
    engine = llm.engine
    replayed = engine._runner.replayed
    if not isinstance(replayed, RecordedSteps):
        raise SystemExit("Only the compiled CPU path can be split; give a quantised model.")
    decode = SteadyDecode(llm, batch, context, steps, first_id=first_id)
    program = replayed.program
    watch = Stopwatch()
    watch.around(engine._scheduler, "schedule", "schedule")
    watch.around(engine._scheduler, "commit", "commit")
    watch.around(engine._runner, "launch", "launch")
    watch.around(replayed, "run", "replay")
    watch.around(program, "run", "program")
    program.cycles = np.zeros(len(program), dtype=np.int64)
    started = time.perf_counter()
    for _ in range(steps):
        decode.step()
    total = time.perf_counter() - started
    cycles, program.cycles = program.cycles, None
    for owner, name in ((engine._scheduler, "schedule"), (engine._scheduler, "commit"), (engine._runner, "launch")):
        delattr(owner, name)
    del replayed.run, program.run
    decode.close()
    seconds = watch.seconds
    parts: dict[str, float] = defaultdict(float)
    for name, count in zip(program.names, cycles, strict=True):
        parts[_kind(name)] += seconds["program"] * float(count / cycles.sum())
    parts["describing the step"] = seconds["replay"] - seconds["program"]
    parts["sampling, rows"] = seconds["launch"] - seconds["replay"]
    parts["scheduling"] = seconds["schedule"]
    parts["committing"] = seconds["commit"]
    parts["rest of the step"] = total - seconds["schedule"] - seconds["launch"] - seconds["commit"]
    parts["step"] = total
    return {name: 1e3 * value / steps for name, value in parts.items()}


def _kind(kernel: str) -> str:
    if kernel in _KINDS:
        return _KINDS[kernel]
    return "attention" if kernel.startswith(("attend", "attention", "rotate", "store", "merge", "plan")) else kernel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--sequences", default="1,16", help="batch sizes, with commas")
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quantization", default="auto")
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model,
        device="cpu",
        num_threads=arguments.threads,
        quantization=arguments.quantization,
        enable_prefix_caching=False,
    )
    batches = [int(part) for part in arguments.sequences.split(",")]
    rehearse(llm, batches, first_id=1)
    results = {}
    for index, batch in enumerate(batches):
        parts = measure(llm, batch, arguments.context, arguments.steps, first_id=10_000 * (index + 1))
        results[batch] = parts
        print(f"\n{batch} sequences of {arguments.context} tokens: {parts['step']:.2f} ms a step")
        for name, value in sorted(parts.items(), key=lambda item: -item[1]):
            if name != "step":
                print(f"  {name:<24} {value:8.3f} ms {100 * value / parts['step']:6.1f} %")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
