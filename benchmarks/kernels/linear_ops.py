"""How close do the linear, norm and activation kernels of a layer come to memory bandwidth?

Every time is that of one CUDA graph that goes through all layers of a model with their own weights
(qkv, o, gate_up, down of each layer in order), so that the L2 cache does not help and each kernel
follows the one it follows in a decode step.  Ways: `ops` is what the engine runs (`TritonOps`);
`vector` folds norm and activation into products of at most 4 rows; `cublas` gives them kernels of their
own, before torch's linear.

    python benchmarks/kernels/linear_ops.py [--models qwen3-0.6b,llama-3.1-8b] [--rows 1,8,64] [--ways ops,cublas]
    python benchmarks/kernels/linear_ops.py --sweep --ways vector --rows 1,2 [--models qwen3-0.6b] [--budget 140]

Needs an NVIDIA GPU.  Prints tables, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from triton.runtime.errors import OutOfResources

from engine.kernels import skinny_linear as skinny
from engine.kernels.gated import silu_mul
from engine.kernels.launch import num_multiprocessors
from engine.kernels.rms_norm import add_rms_norm
from engine.kernels.skinny_linear import SkinnyTuning
from engine.kernels.triton_ops import TritonOps

T = TypeVar("T")
R = TypeVar("R")
DTYPE = torch.bfloat16
EPS = 1e-6
DEVICE = torch.device("cuda")
WAYS = ("ops", "vector", "cublas")
PRODUCTS = ("qkv", "o", "gate_up", "down", "head")


@dataclass(frozen=True)
class Model:
    """Sizes in elements; `num_layers` enough to exceed the L2 cache many times, not always all of them."""

    name: str
    hidden: int
    q_size: int
    kv_size: int
    intermediate: int
    vocab: int
    num_layers: int

    def shape(self, product: str) -> tuple[int, int]:
        """[N, K] of a product's weight."""
        return {
            "qkv": (self.q_size + 2 * self.kv_size, self.hidden),
            "o": (self.hidden, self.q_size),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }[product]

    def num_bytes(self, *products: str) -> int:
        return sum(2 * self.shape(product)[0] * self.shape(product)[1] for product in products)


MODELS = {
    model.name: model
    for model in (
        Model("qwen3-0.6b", 1024, 2048, 1024, 3072, 151936, 28),
        Model("llama-3.1-8b", 4096, 4096, 1024, 14336, 128256, 8),
    )
}


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE) * scale


def microseconds(work: Callable[[], object], *, replays: int = 20, repeats: int = 3) -> float:
    """Median time of one replay of `work` captured in a graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / replays * 1e3)
    return sorted(times)[repeats // 2]


def read_ceiling() -> float:
    """Bytes read per microsecond by the sum of a large buffer."""
    source = torch.empty(2**32, dtype=torch.int8, device=DEVICE).random_().view(torch.bfloat16)
    return 2 * source.numel() / microseconds(source.sum, replays=5)


@dataclass(frozen=True)
class Decoder:
    """The linear side of a model: attention's output is a fixed tensor.  `tunings` override by product."""

    model: Model
    layers: list[dict[str, torch.Tensor]]
    head: torch.Tensor
    norm: torch.Tensor
    ops: TritonOps = field(default_factory=TritonOps)
    tunings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def random(cls, model: Model) -> Decoder:
        layers = [
            {product: random(*model.shape(product), scale=0.02) for product in PRODUCTS[:4]}
            for _ in range(model.num_layers)
        ]
        return cls(
            model,
            layers,
            random(*model.shape("head"), scale=0.02),
            random(model.hidden),
        )

    def inputs(self, rows: int) -> dict[str, torch.Tensor]:
        """hidden and residual [rows, hidden], attention's output [rows, q size], gate_up [rows, 2 I]."""
        model = self.model
        sizes = {
            "hidden": model.hidden,
            "residual": model.hidden,
            "attention": model.q_size,
            "gate_up": 2 * model.intermediate,
        }
        return {name: random(rows, size) for name, size in sizes.items()}

    def norm_linear(
        self, way: str, product: str, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if way == "ops":
            return self.ops.norm_linear(hidden, residual, self.norm, EPS, weight, None)
        if way == "vector" and skinny.supports(hidden, weight):
            tuning = self.tunings.get(product)
            return skinny.norm_skinny_linear(hidden, residual, self.norm, EPS, weight, None, tuning)
        normed, total = add_rms_norm(hidden, residual, self.norm, EPS)
        return self.linear(way, product, normed, weight), total

    def linear(self, way: str, product: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """What a way cannot do, cuBLAS does."""
        if way == "ops":
            return self.ops.linear(x, weight, None)
        if way == "vector" and skinny.supports(x, weight):
            return skinny.skinny_linear(x, weight, None, self.tunings.get(product))
        return linear(x, weight)

    def gated_linear(self, way: str, gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if way == "ops":
            return self.ops.gated_linear(gate_up, weight, None)
        if way == "vector" and skinny.supports(gate_up, weight):
            return skinny.gated_skinny_linear(gate_up, weight, None, self.tunings.get("down"))
        return self.linear(way, "down", silu_mul(gate_up), weight)

    def run_layers(self, way: str, inputs: dict[str, torch.Tensor]) -> None:
        hidden, residual = inputs["hidden"], inputs["residual"]
        for weights in self.layers:
            _, residual = self.norm_linear(way, "qkv", hidden, residual, weights["qkv"])
            hidden = self.linear(way, "o", inputs["attention"], weights["o"])
            gate_up, residual = self.norm_linear(way, "gate_up", hidden, residual, weights["gate_up"])
            hidden = self.gated_linear(way, gate_up, weights["down"])

    def run_product(self, way: str, product: str, inputs: dict[str, torch.Tensor]) -> None:
        for weights in self.layers:
            if product == "o":
                self.linear(way, product, inputs["attention"], weights[product])
            elif product == "down":
                self.gated_linear(way, inputs["gate_up"], weights[product])
            else:
                self.norm_linear(way, product, inputs["hidden"], inputs["residual"], weights[product])

    def run_head(self, way: str, inputs: dict[str, torch.Tensor]) -> None:
        self.norm_linear(way, "head", inputs["hidden"], inputs["residual"], self.head)


def compile_all(decoder: Decoder, cases: Sequence[tuple[str, int]]) -> None:
    """Compile what (way, rows) need, side by side."""
    lone = replace(decoder, layers=decoder.layers[:1])

    def run(case: tuple[str, int]) -> None:
        way, rows = case
        inputs = decoder.inputs(rows)
        lone.run_layers(way, inputs)
        lone.run_head(way, inputs)

    side_by_side(run, cases)


def side_by_side(work: Callable[[T], R], cases: Sequence[T]) -> list[R]:
    with ThreadPoolExecutor(12, initializer=torch.cuda.synchronize) as pool:
        done = list(pool.map(work, cases))
    torch.cuda.synchronize()
    return done


def measure_model(model: Model, all_rows: list[int], ways: list[str], ceiling: float) -> dict[str, float]:
    decoder = Decoder.random(model)
    results: dict[str, float] = {}
    compile_all(decoder, list(itertools.product(ways, all_rows)))
    print(f"\n{model.name}: us per call (GB/s, % of the read ceiling), {model.num_layers} layers")
    for rows, way in itertools.product(all_rows, ways):
        inputs = decoder.inputs(rows)
        layer = microseconds(partial(decoder.run_layers, way, inputs)) / model.num_layers
        head = microseconds(partial(decoder.run_head, way, inputs))
        line = [describe("layer", layer, model.num_bytes(*PRODUCTS[:4]), ceiling)]
        line.append(describe("head", head, model.num_bytes("head"), ceiling))
        results |= {f"{model.name} {way} layer {rows}": layer, f"{model.name} {way} head {rows}": head}
        if rows in (1, 2, 8, 64):
            for product in PRODUCTS[:4]:
                each = microseconds(partial(decoder.run_product, way, product, inputs)) / model.num_layers
                results[f"{model.name} {way} {product} {rows}"] = each
                line.append(describe(product, each, model.num_bytes(product), ceiling))
        print(f"{rows:3} {way:7} " + "  ".join(line), flush=True)
    return results


def describe(name: str, each: float, num_bytes: int, ceiling: float) -> str:
    return f"{name} {each:.2f} ({num_bytes / each / 1e3:.0f}, {num_bytes / each / ceiling:.0%})"


def measure_elementwise(ceiling: float) -> dict[str, float]:
    """Norm and activation alone, over as many distinct buffers as exceed the L2 cache."""
    results: dict[str, float] = {}
    print("\nus per call (GB/s, % of the read ceiling)")
    for rows in (1, 64, 256, 8192):
        copies = max(1, min(32, 2**18 // rows // 32))
        for size in (1024, 4096):
            weight = random(size)
            pairs = [(random(rows, size), random(rows, size)) for _ in range(copies)]
            norm = microseconds(lambda: [add_rms_norm(h, r, weight, EPS) for h, r in pairs]) / copies  # noqa: B023
            results[f"add_rms_norm {rows}x{size}"] = norm
            print(describe(f"add_rms_norm {rows}x{size}", norm, 8 * rows * size, ceiling))
        for size in (3072, 14336):
            gate_ups = [random(rows, 2 * size) for _ in range(copies)]
            gated = microseconds(lambda: [silu_mul(g) for g in gate_ups]) / copies  # noqa: B023
            results[f"silu_mul {rows}x{size}"] = gated
            print(describe(f"silu_mul {rows}x{size}", gated, 6 * rows * size, ceiling), flush=True)
    return results


def vector_candidates(rows: int, k: int) -> Iterator[SkinnyTuning]:
    """Tunings whose weights in flight fit the registers."""
    for block_n, num_warps, warps_per_sm in itertools.product((1, 2, 4, 8, 16), (4, 8, 16), (8, 16, 24, 32)):
        programs_per_sm = warps_per_sm // num_warps
        if programs_per_sm * num_warps != warps_per_sm:
            continue
        tuning = SkinnyTuning(block_n, num_warps, programs_per_sm)
        vectors = -(-k // (256 * num_warps))
        if 8 <= 4 * block_n * vectors <= 64 and (4 * block_n + 8 * rows) * vectors + 32 < tuning.num_registers:
            yield tuning


def sweep(model: Model, rows: int, deadline: float) -> dict[str, object]:
    """Tune one product after the other, each within the whole chain of layers."""
    way = "vector"
    decoder = Decoder.random(model)
    inputs = decoder.inputs(rows)
    results: dict[str, object] = {}
    for product in PRODUCTS:
        work = partial(decoder.run_head if product == "head" else decoder.run_layers, way, inputs)
        n, k = model.shape(product)
        chosen = skinny.choose_tuning(rows, n, k, num_multiprocessors(DEVICE))
        tried = [chosen, *(tuning for tuning in vector_candidates(rows, k) if tuning != chosen)]
        timed: list[tuple[float, SkinnyTuning]] = []
        for tuning in usable(decoder, way, product, inputs, tried):
            decoder.tunings[product] = tuning
            timed.append((microseconds(work, replays=5), tuning))
            if time.monotonic() > deadline:
                break
        first = timed[0][0]
        timed.sort(key=lambda pair: pair[0])
        decoder.tunings[product] = timed[0][1]
        per = 1 if product == "head" else model.num_layers
        print(f"\n{model.name} {product} [{n}, {k}] {rows} rows, {way}: now {first / per:.2f} us with {chosen}")
        for duration, tuning in timed[:5]:
            print(f"  {duration / per:.2f} us {tuning}")
        results[f"{model.name} {way} {product} {rows}"] = [round(timed[0][0] / per, 3), repr(timed[0][1])]
        if time.monotonic() > deadline:
            print("out of time")
            break
    return results


def usable(
    decoder: Decoder, way: str, product: str, inputs: dict[str, torch.Tensor], tried: list[SkinnyTuning]
) -> list[SkinnyTuning]:
    """Compiles all; leaves out what the device refuses."""

    def runs(tuning: SkinnyTuning) -> bool:
        lone = replace(decoder, layers=decoder.layers[:1], tunings={product: tuning})
        try:
            if product == "head":
                lone.run_head(way, inputs)
            else:
                lone.run_product(way, product, inputs)
        except OutOfResources:
            return False
        return True

    return [tuning for tuning, ok in zip(tried, side_by_side(runs, tried), strict=True) if ok]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128", help="rows of the products")
    parser.add_argument("--ways", default="ops,cublas", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--sweep", action="store_true", help="try tunings and print the best of each product")
    parser.add_argument("--budget", type=float, default=140, help="seconds after which a sweep stops")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    models = [MODELS[name] for name in options.models.split(",")]
    rows = [int(number) for number in options.rows.split(",")]
    ways = options.ways.split(",")
    torch.manual_seed(0)
    ceiling = read_ceiling()
    print(f"{torch.cuda.get_device_name()}: a sum reads {ceiling / 1e3:.0f} GB/s")
    results: dict[str, object] = {"read GB/s": ceiling / 1e3}
    if options.sweep:
        cases = [(model, count) for model, count in itertools.product(models, rows) if count <= skinny.MAX_ROWS]
        for number, (model, count) in enumerate(cases):
            share = (deadline - time.monotonic()) / (len(cases) - number)
            results |= sweep(model, count, time.monotonic() + share)
    else:
        for model in models:
            results |= measure_model(model, rows, ways, ceiling)
        results |= measure_elementwise(ceiling)
    print(json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in results.items()}))


if __name__ == "__main__":
    main()
