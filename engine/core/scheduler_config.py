"""`SchedulerConfig`: the limits a scheduler keeps; made by `engine.build`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine; lengths and budgets in tokens.

    `num_blocks` is how many there are at first.  `max_model_len` bounds contexts however many there will be; while
    the blocks hold less, that is the longest context in force (`Scheduler.max_model_len`).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len must hold a prompt and an output token, so at least 2, not {self.max_model_len}."
            )
        if self.num_blocks * self.block_size < 2:
            raise ValueError("One block of one token does not hold a prompt and an output token; raise num_blocks.")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"Without chunked prefill a step must hold a whole prompt: raise max_num_batched_tokens from "
                f"{self.max_num_batched_tokens} to max_model_len {self.max_model_len}."
            )
