"""How much does quantisation cost in quality?  Perplexity of one text for each way of loading the same checkpoint.

    python benchmarks/perplexity.py --model FILE [--quantization none,auto,int8] [--text FILE]

The text is cut into windows; the first token of a window is given, every other is scored.  Scoring goes
through the engine as requests do: for each position one request with the tokens before it, whose next token
is forced by a logit bias and whose logprob, which the engine reports as it was before the bias, is the score.
The prefix cache holds the window, so that a request computes no more than the last block of its prompt.
Decoding is thus measured in batches of requests of many lengths.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The checkout, not this folder, whose `profile.py` would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from engine import LLM
from engine.api.request import Prompt
from engine.api.sampling import SamplingParams
from engine.text.tokenizer import load_tokenizer

TEXT = Path(__file__).parent / "data" / "prose.txt"
REFERENCE = "none"
"""The way of loading that the others are compared with: the checkpoint's own values, dequantised."""
FIRST_SEQUENCE_ID = 10**9
"""Far above what `LLM` itself hands out."""
FORCE = 100.0
"""Bias that makes any token the likeliest."""


class Scorer:
    """Scores given tokens with one loaded model."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine
        self._sequence_ids = itertools.count(FIRST_SEQUENCE_ID)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Natural-log probability of every token but the first, given those before it."""
        last = len(token_ids) - 1
        # The longest first and alone: it leaves the blocks that all the others share in the prefix cache.
        final = self._score(token_ids, range(last, last + 1))
        return self._score(token_ids, range(1, last)) + final

    def _score(self, token_ids: Sequence[int], positions: range) -> list[float]:
        waiting: dict[int, int] = {}
        for position in positions:
            prompt = self._prompt(token_ids[:position], token_ids[position])
            waiting[prompt.sequence_id] = position
            self._engine.submit(prompt)
        found: dict[int, float] = {}
        while self._engine.has_work:
            for output in self._engine.step():
                position = waiting[output.sequence_id]
                if output.token_ids != (token_ids[position],):
                    raise RuntimeError(output.error_message or "the engine did not choose the token it was made to")
                found[position] = output.logprobs[0].logprob
        return [found[position] for position in positions]

    def _prompt(self, before: Sequence[int], token_id: int) -> Prompt:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0, logit_bias={token_id: FORCE}
        )
        return Prompt(next(self._sequence_ids), tuple(before), 1, sampling)


def windows(token_ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """Pieces of `size` tokens; a last one too short to score anything is left out."""
    pieces = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    return [piece for piece in pieces if len(piece) > 1]


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean negative logprob (natural)."""
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Perplexity, and its ratio to that of "none" if that is among the ways asked for, by way of loading."""
    path = Path(arguments.model)
    token_ids = load_tokenizer(path).encode(arguments.text.read_text(encoding="utf-8"))[: arguments.max_tokens]
    pieces = windows(token_ids, arguments.window)
    results: dict[str, dict[str, Any]] = {}
    for way in arguments.quantization:
        started = time.perf_counter()
        llm = LLM(
            path,
            quantization=way,
            device=arguments.device,
            num_threads=arguments.threads,
            max_model_len=arguments.window + 1,
        )
        scorer = Scorer(llm)
        logprobs = [logprob for piece in pieces for logprob in scorer.logprobs(piece)]
        results[way] = {
            "perplexity": perplexity(logprobs),
            "scored_tokens": len(logprobs),
            "dtype": llm.facts.dtype,
            "weight_bytes": llm.facts.weight_bytes,
            "took_s": round(time.perf_counter() - started, 1),
        }
        # One model at a time in memory.
        del scorer, llm
    reference = results.get(REFERENCE, {}).get("perplexity")
    for result in results.values():
        result["ratio_to_none"] = result["perplexity"] / reference if reference else None
    return results


def print_table(results: dict[str, dict[str, Any]]) -> None:
    print(f"{'quantization':14}{'perplexity':>12}{'to none':>10}{'scored':>8}{'MiB':>8}{'took s':>8}")
    for way, result in results.items():
        ratio = f"{result['ratio_to_none']:.4f}" if result["ratio_to_none"] else "-"
        print(
            f"{way:14}{result['perplexity']:>12.4f}{ratio:>10}{result['scored_tokens']:>8,}"
            f"{result['weight_bytes'] / 2**20:>8,.0f}{result['took_s']:>8.1f}"
        )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Perplexity of one text for each way of loading a checkpoint.")
    parser.add_argument("--model", required=True, help="directory or GGUF file")
    parser.add_argument("--quantization", type=lambda text: text.split(","), default=[REFERENCE, "auto", "int8"])
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=1024, help="tokens")
    parser.add_argument("--max-tokens", type=int, help="of the text; else all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    results = measure(arguments)
    print_table(results)
    print(json.dumps({"benchmark": "perplexity", "model": arguments.model, "text": arguments.text.name, **results}))


if __name__ == "__main__":
    main()
