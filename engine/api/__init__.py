"""The engine's contract with its callers: plain values, no torch."""

from engine.api.config import EngineConfig
from engine.api.errors import EngineError
from engine.api.output import CompletionOutput, OutputDelta, RequestOutput, StepOutput, Usage
from engine.api.request import GenerateRequest, Prompt
from engine.api.sampling import SamplingParams

__all__ = [
    "CompletionOutput",
    "EngineConfig",
    "EngineError",
    "GenerateRequest",
    "OutputDelta",
    "Prompt",
    "RequestOutput",
    "SamplingParams",
    "StepOutput",
    "Usage",
]
