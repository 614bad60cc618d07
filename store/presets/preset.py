"""`Preset`: what a person puts on top of a model's files: a system prompt, sampling defaults, a template.

Written by `modelfile`, kept in the manifests of `models`, applied by `app`.  Knows neither Modelfiles
nor engines; ranges of values are the engine's to check.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant"]


class PresetMessage(msgspec.Struct, frozen=True):
    """One message that goes before every conversation."""

    role: Role
    content: str


class Parameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults of a request, by the engine's names; None where the preset says nothing.

    `context_length` bounds prompt and answer together, in tokens.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    context_length: int | None = None
    stop: tuple[str, ...] = ()

    def given(self) -> dict[str, Any]:
        """The values that are set, by name."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value not in (None, ())}

    def sampling(self) -> dict[str, Any]:
        """The values that are set and that a request may replace."""
        return {name: value for name, value in self.given().items() if name != "context_length"}

    def over(self, base: Parameters) -> Parameters:
        """These values, and where they are silent those of `base`."""
        return Parameters(**{**base.given(), **self.given()})


class Preset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`system` and `messages` go before every conversation, the first only where that brings none of its own;
    `template` is Jinja and replaces the checkpoint's."""

    parameters: Parameters = Parameters()
    system: str | None = None
    template: str | None = None
    messages: tuple[PresetMessage, ...] = ()
    license: str | None = None

    def over(self, base: Preset | None) -> Preset:
        """This preset, and where it is silent what `base` says."""
        if base is None:
            return self
        return Preset(
            parameters=self.parameters.over(base.parameters),
            system=base.system if self.system is None else self.system,
            template=base.template if self.template is None else self.template,
            messages=self.messages or base.messages,
            license=base.license if self.license is None else self.license,
        )

    def opening(self, messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        """`messages` with what goes before them.

        System messages that begin the conversation stay first, as most templates demand, and replace this
        preset's own.
        """
        own_system = [message for message in messages if message["role"] == "system"]
        num_leading = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        before: list[dict[str, Any]] = []
        if self.system and not own_system:
            before.append({"role": "system", "content": self.system})
        examples = [
            {"role": message.role, "content": message.content}
            for message in self.messages
            if message.role != "system" or not own_system
        ]
        return (*messages[:num_leading], *before, *examples, *messages[num_leading:])
