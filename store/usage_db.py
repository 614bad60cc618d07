"""`UsageDb`: how long the prompts and answers of each model have been.

Lengths in tokens are counted in buckets whose edges grow by 2^(1/16): bucket i holds the lengths above
2^((i-1)/16) and up to 2^(i/16), and a quantile is read as the upper edge of its bucket: never below the
true one, less than 4.5 % above it, and exact up to 26 tokens.  The maxima are kept exactly.  A year of
requests takes a few hundred rows per model, and no text.

Called by `app.usage_recorder` (writes, in batches) and by `GET /api/usage` and `quire usage` (read).
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec

from store.database import writing

BUCKETS_PER_DOUBLING = 16
_ADVISED_STEP = 1024
_MIN_REQUESTS = 100
"""Below this, P99 is just the longest."""

LengthKind = Literal["prompt", "output"]


class Lengths(msgspec.Struct):
    """Lengths of one model that were counted in memory and wait to be written; the rest as in `ModelUsage`."""

    max_model_len: int
    num_requests: int = 0
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0
    last_used_at: float = 0.0
    max_at_once: int = 0
    prompt: Counter[int] = msgspec.field(default_factory=Counter)
    output: Counter[int] = msgspec.field(default_factory=Counter)

    def add(self, prompt_tokens: int, output_tokens: int, at: float, *, num_at_once: int = 1) -> None:
        """Count one sequence that ended when `num_at_once` were open, itself among them."""
        self.num_requests += 1
        self.max_prompt_tokens = max(self.max_prompt_tokens, prompt_tokens)
        self.max_output_tokens = max(self.max_output_tokens, output_tokens)
        self.last_used_at = max(self.last_used_at, at)
        self.max_at_once = max(self.max_at_once, num_at_once)
        self.prompt[bucket_of(prompt_tokens)] += 1
        self.output[bucket_of(output_tokens)] += 1


class ModelUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens of one model's requests; a request for several samples counts once for each.

    `max_model_len` is what the model was last served with, `last_used_at` in seconds since the epoch, `max_at_once`
    the most requests that were open together; 0 where that was not recorded yet.
    """

    model: str
    num_requests: int
    prompt_p50: int
    prompt_p99: int
    prompt_max: int
    output_p50: int
    output_p99: int
    output_max: int
    max_model_len: int
    last_used_at: float
    max_at_once: int = 0

    @property
    def needed_model_len(self) -> int:
        """P99 of the prompts plus the longest answer: what `max_model_len` should be, in tokens."""
        return self.prompt_p99 + self.output_max


class UsageDb:
    """The usage tables of one database."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def add(self, lengths: Mapping[str, Lengths]) -> None:
        """Add what was counted since the last call, by model, in one transaction."""
        with writing(self._connection):
            for model, counted in lengths.items():
                self._connection.execute(
                    "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (model) DO UPDATE SET "
                    "num_requests = num_requests + excluded.num_requests, "
                    "max_prompt_tokens = max(max_prompt_tokens, excluded.max_prompt_tokens), "
                    "max_output_tokens = max(max_output_tokens, excluded.max_output_tokens), "
                    "max_model_len = excluded.max_model_len, "
                    "last_used_at = max(last_used_at, excluded.last_used_at), "
                    "max_at_once = max(max_at_once, excluded.max_at_once)",
                    (
                        model,
                        counted.num_requests,
                        counted.max_prompt_tokens,
                        counted.max_output_tokens,
                        counted.max_model_len,
                        counted.last_used_at,
                        counted.max_at_once,
                    ),
                )
                for kind, buckets in (("prompt", counted.prompt), ("output", counted.output)):
                    self._connection.executemany(
                        "INSERT INTO usage_buckets VALUES (?, ?, ?, ?) "
                        "ON CONFLICT (model, kind, bucket) DO UPDATE SET count = count + excluded.count",
                        [(model, kind, bucket, count) for bucket, count in buckets.items()],
                    )

    def percentile(self, model: str, kind: LengthKind, share: float) -> int:
        """The length that `share` (0 to 1) of this model's prompts or outputs do not exceed; 0 if there are none."""
        rows = self._connection.execute(
            "SELECT bucket, count FROM usage_buckets WHERE model = ? AND kind = ?", (model, kind)
        )
        column = "max_prompt_tokens" if kind == "prompt" else "max_output_tokens"
        longest = self._connection.execute(f"SELECT {column} FROM usage WHERE model = ?", (model,)).fetchone()
        return quantile(dict(rows), longest[0], share) if longest else 0

    def models(self) -> list[ModelUsage]:
        """Every model that has answered something, the one used last first."""
        rows = self._connection.execute(
            "SELECT model, num_requests, max_prompt_tokens, max_output_tokens, max_model_len, last_used_at, "
            "max_at_once FROM usage ORDER BY last_used_at DESC, model"
        ).fetchall()
        return [
            ModelUsage(
                model=model,
                num_requests=num_requests,
                prompt_p50=self.percentile(model, "prompt", 0.5),
                prompt_p99=self.percentile(model, "prompt", 0.99),
                prompt_max=max_prompt,
                output_p50=self.percentile(model, "output", 0.5),
                output_p99=self.percentile(model, "output", 0.99),
                output_max=max_output,
                max_model_len=max_model_len,
                last_used_at=last_used_at,
                max_at_once=max_at_once,
            )
            for model, num_requests, max_prompt, max_output, max_model_len, last_used_at, max_at_once in rows
        ]


def bucket_of(num_tokens: int) -> int:
    """The bucket of a length; 0 and 1 share the first."""
    return math.ceil(BUCKETS_PER_DOUBLING * math.log2(num_tokens)) if num_tokens > 1 else 0


def upper_edge(bucket: int) -> int:
    """The greatest whole length in a bucket."""
    return math.floor(2 ** (bucket / BUCKETS_PER_DOUBLING))


def quantile(buckets: Mapping[int, int], longest: int, share: float) -> int:
    """The upper edge of the bucket that holds the quantile, at most `longest`."""
    rank = max(1, math.ceil(share * sum(buckets.values())))
    seen = 0
    for bucket, count in sorted(buckets.items()):
        seen += count
        if seen >= rank:
            return min(upper_edge(bucket), longest)
    return 0


def length_advice(usage: ModelUsage) -> str:
    """One sentence that says what `max_model_len` the recorded requests need, and what to do about it.

    Of a model that only reads, whose lengths cost nothing when they are not used, just how long its texts are.
    """
    if usage.output_max == 0:
        return f"Your texts have up to {usage.prompt_max:,} tokens; the model takes {usage.max_model_len:,}."
    needed = usage.needed_model_len
    advised = math.ceil(needed / _ADVISED_STEP) * _ADVISED_STEP
    requests = "requests" if usage.num_requests >= _MIN_REQUESTS else f"requests so far ({usage.num_requests})"
    facts = f"Your {requests} need {needed:,} tokens (P99 of the prompts plus the longest answer)"
    if needed > usage.max_model_len:
        return (
            f"{facts} and max_model_len is {usage.max_model_len:,}, so that a long prompt leaves too little room "
            "for a long answer; raise QUIRE_MAX_MODEL_LEN where the model allows more, or shorten the prompts."
        )
    if advised < usage.max_model_len:
        return (
            f"{facts} and max_model_len is {usage.max_model_len:,}; QUIRE_MAX_MODEL_LEN={advised} would serve them "
            "and keep one request from taking more."
        )
    return f"{facts}; max_model_len, {usage.max_model_len:,}, fits them."
