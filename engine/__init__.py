"""The paged engine.  `from engine import LLM, SamplingParams` is all an offline user needs.

Importing this package, `engine.api` or `engine.text` does not import torch; `LLM` does,
on first use.
"""

import os
from typing import TYPE_CHECKING, Any

from engine.api.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        # Torch reads it once, when it is first imported.  Threads that spin while they wait make a step several
        # times slower on cores that other programs use too (docs/log.md, 2026-11-21).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
