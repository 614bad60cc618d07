"""The sizes that a GPU's steps are padded to, each of which has a CUDA graph; plain integers.

Used by `engine.runner`, which captures the graphs, and by whoever reckons with what they take.
"""

from __future__ import annotations

DECODE_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Sequences that a step of decodes alone is padded to."""
PROMPT_SIZES = (16, 32, 64, 128, 256, 384, 512, 768, 1024)
"""Tokens that a prompt alone is padded to."""


def decode_sizes(max_num_seqs: int) -> list[int]:
    """The sizes that decodes of up to `max_num_seqs` sequences are padded to."""
    largest = min(max_num_seqs, DECODE_SIZES[-1])
    return [size for size in DECODE_SIZES if size < largest] + [largest]
