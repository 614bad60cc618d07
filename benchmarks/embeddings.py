"""Is Quire ahead of sentence-transformers on these cores?  Both in one run, in turns, on the same texts and threads.

    python benchmarks/embeddings.py --model DIRECTORY [--threads 2] [--texts 256] [--repeats 7]
        [--sentence-folder DIRECTORY] [--base-url http://127.0.0.1:11435 --name NAME] [--clients 8]

Each contender runs in a child process of its own that stays loaded; one that is not asked computes nothing.  Every
repeat embeds new texts, spans of prose of 5 to 250 words that all contenders get alike, and the order of the
contenders changes each time.  Times include tokenising.  `quire` is the engine in process; with `--base-url` a running
daemon is asked for the model `--name` too, by `--clients` at once with batches of 16 texts, over HTTP.
sentence-transformers may lie in a folder of its own (pip install --target), `--sentence-folder`.

A ratio is of sentence-transformers' seconds to the other's within a repeat; the median is what counts.  `cpu` is the
same of processor time, which other programs disturb less; a daemon's is not known.  Distances are of cosines, against
sentence-transformers' vectors.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

if __name__ == "__main__":
    # The checkout, not this folder, whose `profile.py` would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import httpx
import numpy as np

from benchmarks.embedders.answer import Answer, largest_distance
from benchmarks.llamacpp.child import Child

PROSE = Path(__file__).parent / "data" / "prose.txt"
WORDS = (5, 250)
HTTP_BATCH = 16
WARM_UP_TEXTS = 32
REST_S = 0.3
"""Between runs, so that the threads of the one before have gone to sleep."""
REFERENCE = "sentence-transformers"


class Contender(Protocol):
    def embed(self, texts: Sequence[str]) -> Answer: ...

    def cpu_s(self) -> float | None:
        """Processor time so far, if it is known."""
        ...


class InChild:
    """A loaded child process."""

    def __init__(self, child: Child, **options: Any) -> None:
        self._child = child
        self.loaded: dict[str, Any] = child.ask("load", **options)

    def embed(self, texts: Sequence[str]) -> Answer:
        return Answer.from_json(self._child.ask("embed", texts=list(texts)))

    def cpu_s(self) -> float | None:
        return float(self._child.ask("usage")["cpu_s"])


class OverHttp:
    """A running daemon, asked by several clients at once."""

    def __init__(self, client: httpx.Client, name: str, num_clients: int) -> None:
        self._client = client
        self._name = name
        self._num_clients = num_clients

    def embed(self, texts: Sequence[str]) -> Answer:
        batches = [texts[start : start + HTTP_BATCH] for start in range(0, len(texts), HTTP_BATCH)]
        started = time.perf_counter()
        with ThreadPoolExecutor(self._num_clients) as clients:
            answers = list(clients.map(self._ask, batches))
        seconds = time.perf_counter() - started
        vectors = [
            np.frombuffer(base64.b64decode(entry["embedding"]), dtype=np.float32)
            for answer in answers
            for entry in sorted(answer["data"], key=lambda entry: entry["index"])
        ]
        return Answer.of(vectors, seconds, sum(answer["usage"]["prompt_tokens"] for answer in answers))

    def cpu_s(self) -> float | None:
        return None

    def _ask(self, texts: Sequence[str]) -> dict[str, Any]:
        body = {"model": self._name, "input": list(texts), "encoding_format": "base64", "truncate": True}
        response = self._client.post("/v1/embeddings", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer


def mixed_texts(count: int, seed: int) -> list[str]:
    """Spans of prose, each from another place and of another length."""
    rng = random.Random(seed)
    words = PROSE.read_text().split()
    texts = []
    for _ in range(count):
        length = rng.randint(*WORDS)
        start = rng.randrange(len(words) - length)
        texts.append(" ".join(words[start : start + length]))
    return texts


class Figures:
    """What has been measured so far, by contender, in the order of repeats."""

    def __init__(self, names: Sequence[str]) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.cpu_s: dict[str, list[float]] = {name: [] for name in names}
        self.distances: dict[str, float] = dict.fromkeys(names, 0.0)
        self.counts_equal: dict[str, bool] = dict.fromkeys(names, True)
        self.tokens: list[int] = []

    def add(self, answers: dict[str, Answer], cpu_s: dict[str, float | None]) -> None:
        """The answers of one repeat."""
        reference = answers[REFERENCE]
        self.tokens.append(reference.num_tokens)
        for name, answer in answers.items():
            self.seconds[name].append(answer.seconds)
            used = cpu_s[name]
            if used is not None:
                self.cpu_s[name].append(used)
            self.distances[name] = max(self.distances[name], largest_distance(answer.vectors, reference.vectors))
            self.counts_equal[name] = self.counts_equal[name] and answer.num_tokens == reference.num_tokens

    def summary(self, name: str) -> dict[str, Any]:
        ratios, cpu_ratios = self._ratios(self.seconds, name), self._ratios(self.cpu_s, name)
        rates = [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds[name], strict=True)]
        return {
            "tokens_per_s": round(statistics.median(rates)),
            "best_tokens_per_s": round(max(rates)),
            "ratio": round(statistics.median(ratios), 2),
            "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
            "best_ratio": round(min(self.seconds[REFERENCE]) / min(self.seconds[name]), 2),
            "cpu_ratio": round(statistics.median(cpu_ratios), 2) if cpu_ratios else None,
            "largest_distance": self.distances[name],
            "token_counts_equal": self.counts_equal[name],
        }

    def _ratios(self, figures: dict[str, list[float]], name: str) -> list[float]:
        if not figures[name]:
            return []
        return [theirs / own for theirs, own in zip(figures[REFERENCE], figures[name], strict=True)]


def measure(contenders: dict[str, Contender], num_texts: int, repeats: int) -> Figures:
    figures = Figures(list(contenders))
    for contender in contenders.values():
        contender.embed(mixed_texts(WARM_UP_TEXTS, seed=-1))
    for repeat in range(repeats):
        texts = mixed_texts(num_texts, seed=repeat)
        answers: dict[str, Answer] = {}
        used: dict[str, float | None] = {}
        names = list(contenders)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            time.sleep(REST_S)
            before_s = contenders[name].cpu_s()
            answers[name] = contenders[name].embed(texts)
            after_s = contenders[name].cpu_s()
            used[name] = None if before_s is None or after_s is None else after_s - before_s
        figures.add(answers, used)
        said = (f"{name} {answers[name].seconds:.2f} s" for name in names)
        print(f"repeat {repeat + 1}: {figures.tokens[-1]:,} tokens: {', '.join(said)}", flush=True)
    return figures


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    model = str(Path(arguments.model).resolve())
    options = {"model": model, "threads": arguments.threads}
    with contextlib.ExitStack() as stack:
        children = {
            name: stack.enter_context(Child(sys.executable, f"benchmarks.embedders.{module}"))
            for name, module in ((REFERENCE, "sentence_child"), ("quire", "quire_child"))
        }
        contenders: dict[str, Contender] = {
            REFERENCE: InChild(children[REFERENCE], folder=arguments.sentence_folder, **options),
            "quire": InChild(children["quire"], **options),
        }
        if arguments.base_url:
            client = stack.enter_context(httpx.Client(base_url=arguments.base_url, timeout=600.0))
            contenders["quire over HTTP"] = OverHttp(client, arguments.name, arguments.clients)
        figures = measure(contenders, arguments.texts, arguments.repeats)
    return {name: figures.summary(name) for name in contenders}


def table(summaries: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':24}{'tokens/s':>10}{'best':>10}{'ratio':>8}{'range':>14}{'cpu':>7}{'distance':>12}{'tokens':>9}"]
    for name, row in summaries.items():
        low, high = row["ratio_range"]
        cpu = "" if row["cpu_ratio"] is None else f"{row['cpu_ratio']:.2f}"
        counts = "equal" if row["token_counts_equal"] else "differ"
        lines.append(
            f"{name:24}{row['tokens_per_s']:>10,}{row['best_tokens_per_s']:>10,}{row['ratio']:>8.2f}"
            f"{f'{low:.2f}-{high:.2f}':>14}{cpu:>7}{row['largest_distance']:>12.1e}{counts:>9}"
        )
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Embedding throughput beside sentence-transformers.")
    parser.add_argument("--model", required=True, help="a directory with a sentence-transformers model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sentence-folder", help="where sentence-transformers is installed, if apart")
    parser.add_argument("--base-url", help="of a running daemon, to be asked too")
    parser.add_argument("--name", help="the model's name there")
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args(argv)
    if bool(arguments.base_url) != bool(arguments.name):
        parser.error("--base-url and --name go together")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    summaries = run(arguments)
    print(table(summaries))
    print(json.dumps({"benchmark": "embeddings", "texts": arguments.texts, "threads": arguments.threads, **summaries}))


if __name__ == "__main__":
    main()
