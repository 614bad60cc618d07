"""`SamplingParams`: how the next token is chosen and when generation ends.

One frozen value serves the offline API, the HTTP dialects and the wire to the worker.
`validate()` is called once, where a request enters (`engine.text.stage`).  The fields
from `stop` on concern text and are handled in the text stage; the worker ignores them.
"""

from __future__ import annotations

import math

import msgspec

from engine.api.errors import InvalidParameter

MAX_LOGPROBS = 20
MAX_SAMPLES = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling settings of one request.

    `temperature` 0 means greedy.  `top_k` 0 or -1 means no limit.  `max_tokens` None
    means up to the end of the context.  `logprobs` is the number of alternatives to
    report beside each sampled token (0 reports the sampled token alone).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def validate(self) -> None:
        """Raise `InvalidParameter` for the first field that is out of range."""
        _require_between("n", self.n, 1, MAX_SAMPLES)
        _require_between("temperature", self.temperature, 0.0, 100.0)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidParameter("top_p", f"top_p must be above 0 and at most 1, not {self.top_p}.")
        _require_between("top_k", self.top_k, -1, 2**31 - 1)
        _require_between("min_p", self.min_p, 0.0, 1.0)
        _require_between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise InvalidParameter(
                "repetition_penalty", f"repetition_penalty must be above 0, not {self.repetition_penalty}."
            )
        for token_id, bias in (self.logit_bias or {}).items():
            _require_between(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if self.seed is not None:
            _require_between("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _require_between("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _require_between("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})."
            )
        if self.logprobs is not None:
            _require_between("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if any(not text for text in self.stop):
            raise InvalidParameter("stop", "A stop string must not be empty.")


def _require_between(param: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidParameter(param, f"{param} must be between {low} and {high}, not {value}.")
