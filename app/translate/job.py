"""`GenerateJob`, `EmbedJob`, `ScoreJob`: one HTTP request in engine terms, before the model is known.

Every dialect's translation ends here, so that a bad request is refused before a cold model
is loaded for nothing.  `app.generation` and `app.pooling` run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.api.request import EmbedRequest, GenerateRequest, ScoreRequest
from engine.api.sampling import SamplingParams
from store.presets.preset import Preset


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """Prompts times samples; choice `i * num_samples + j` is sample j of prompt i.

    `overrides` are the sampling fields that the client gave; where it is silent the model's
    generation defaults hold.  The requests in `prompts` carry no sampling of their own.  `keep_alive` is how long
    the model shall stay in memory afterwards, in seconds; None leaves that to the settings.
    """

    model: str
    prompts: tuple[GenerateRequest, ...]
    overrides: Mapping[str, Any]
    keep_alive: float | None = None

    @property
    def num_samples(self) -> int:
        return int(self.overrides.get("n", 1))

    def requests(self, defaults: Mapping[str, Any], preset: Preset | None = None) -> tuple[GenerateRequest, ...]:
        """What goes to the engine: the client's sampling over the model's defaults, messages behind the preset's."""
        sampling = SamplingParams(**{**defaults, **self.overrides})
        requests = (msgspec.structs.replace(prompt, sampling=sampling) for prompt in self.prompts)
        if preset is None:
            return tuple(requests)
        return tuple(
            msgspec.structs.replace(request, messages=preset.opening(request.messages), chat_template=preset.template)
            if request.messages
            else request
            for request in requests
        )


@dataclass(frozen=True, slots=True)
class EmbedJob:
    """One request for vectors; `keep_alive` is as in `GenerateJob`."""

    model: str
    request: EmbedRequest
    keep_alive: float | None = None


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """One request for scores of pairs; `keep_alive` is as in `GenerateJob`."""

    model: str
    request: ScoreRequest
    keep_alive: float | None = None
