"""`GenerateJob`: one HTTP request in engine terms, before the model's own defaults are known.

Every dialect's translation ends here, so that a bad request is refused before a cold model
is loaded for nothing.  `app.generation` turns it into `GenerateRequest`s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.api.request import GenerateRequest
from engine.api.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """Prompts times samples; choice `i * num_samples + j` is sample j of prompt i.

    `overrides` are the sampling fields that the client gave; where it is silent the model's
    generation defaults hold.  The requests in `prompts` carry no sampling of their own.
    """

    model: str
    prompts: tuple[GenerateRequest, ...]
    overrides: Mapping[str, Any]

    @property
    def num_samples(self) -> int:
        return int(self.overrides.get("n", 1))

    def requests(self, defaults: Mapping[str, float]) -> tuple[GenerateRequest, ...]:
        sampling = SamplingParams(**{**defaults, **self.overrides})
        return tuple(msgspec.structs.replace(prompt, sampling=sampling) for prompt in self.prompts)
