"""`Sequence`: one generation inside the engine, the only mutable state of scheduling.

There is no prefill state and no decode state: `num_computed_tokens` chases `num_tokens`, and a
sequence one token behind is what others call decoding.  `num_tokens` counts tokens the host does not
know yet: a step in flight on the device will sample them.  Written by `engine.core.scheduler` and
`engine.core.prefix_cache` alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.api.output import FinishReason
from engine.api.request import Prompt

NO_ROW = -1


class Sequence:
    """Tokens, blocks and progress of one `Prompt`.

    `token_ids`           prompt and outputs known to the host
    `num_tokens`          all of those plus the ones being sampled on the device
    `num_computed_tokens` tokens whose keys and values are in the cache, or will be once the steps
                          scheduled so far have run
    `max_total_tokens`    prompt and outputs together never exceed this
    `is_pooled`           ends once its prompt is computed, and samples nothing
    `block_table`         block ids that hold those keys and values; while running they reach at
                          least to the last known token of the (re)start
    `block_hashes`        prefix cache identity of the full blocks so far, kept across preemptions
    `num_hashed_blocks`   leading blocks of `block_table` that the prefix cache has already been offered
    `row`                 slot on the device while running, else `NO_ROW`
    `num_cached_tokens`   prompt tokens that the prefix cache served before the first output
    `num_bypasses`        times a younger sequence was admitted while this one led the queue
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_table",
        "is_pooled",
        "max_total_tokens",
        "num_bypasses",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "prompt",
        "row",
        "sequence_id",
        "token_ids",
    )

    def __init__(self, prompt: Prompt, *, arrival: int, max_model_len: int) -> None:
        self.prompt = prompt
        self.sequence_id = prompt.sequence_id
        self.arrival = arrival
        self.token_ids = list(prompt.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.is_pooled = prompt.pooling is not None
        max_tokens = 0 if self.is_pooled else prompt.max_tokens
        self.max_total_tokens = min(self.num_prompt_tokens + max_tokens, max_model_len)
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_hashed_blocks = 0
        self.row = NO_ROW
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_bypasses = 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id}, {len(self.token_ids)}+{self.num_pending_tokens} tokens, "
            f"{self.num_computed_tokens} computed, {len(self.block_table)} blocks, row {self.row})"
        )

    @property
    def is_running(self) -> bool:
        """A sequence has a row exactly while it is running; otherwise it waits."""
        return self.row != NO_ROW

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that steps in flight sample; they survive a preemption, so a restart waits for them."""
        return self.num_tokens - len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    def finish_reason(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Whether `token_id`, just appended, ends the sequence, and the stop token if it is one.

        A token counts as a stop token once `min_tokens` outputs precede it, which is when the sampler allows it.
        """
        prompt = self.prompt
        if token_id in prompt.stop_token_ids and self.num_output_tokens > prompt.sampling.min_tokens:
            return "stop", token_id
        if len(self.token_ids) >= self.max_total_tokens:
            return "length", None
        return None, None

    def rename_blocks(self, new_ids: Mapping[int, int]) -> int | None:
        """Put the new ids of blocks into the block table; the first index that changed."""
        changed = [index for index, block_id in enumerate(self.block_table) if block_id in new_ids]
        for index in changed:
            self.block_table[index] = new_ids[self.block_table[index]]
        return changed[0] if changed else None
