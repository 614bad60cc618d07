"""Draws tokens from filtered distributions: temperature, then top-k, top-p and min-p.

Every row brings one uniform number, and the token is found by inverting the cumulative
distribution over candidates in falling order of probability.  A row's token therefore
depends on its own logits and number alone, never on the rest of the batch.  Sorting a whole
vocabulary is slow, so the filters look at the most likely candidates first and fall back to
a full sort for the rows whose filters reach further.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class Filters:
    """Per-row settings, all [R]: `temperature`, `top_p`, `min_p` float32, `top_k` int64 (0: no limit)."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def select(self, index: torch.Tensor) -> Filters:
        return Filters(self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index])

    def unlimited(self) -> torch.Tensor:
        """bool [R]: rows that keep the whole vocabulary."""
        return (self.top_k == 0) & (self.top_p >= 1.0) & (self.min_p <= 0.0)


def draw(logits: torch.Tensor, filters: Filters, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token id per row: logits float32 [R, V], uniform float64 [R] in [0, 1) -> int64 [R]."""
    scaled = logits / filters.temperature[:, None]
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    unlimited = filters.unlimited()
    free_rows, filtered_rows = unlimited.nonzero()[:, 0], (~unlimited).nonzero()[:, 0]
    if len(free_rows):
        token_ids[free_rows] = _invert(scaled[free_rows].softmax(-1), uniform[free_rows])
    if len(filtered_rows):
        token_ids[filtered_rows] = _draw_filtered(
            scaled[filtered_rows], filters.select(filtered_rows), uniform[filtered_rows]
        )
    return token_ids


def _draw_filtered(scaled: torch.Tensor, filters: Filters, uniform: torch.Tensor) -> torch.Tensor:
    vocab_size = scaled.shape[1]
    num_candidates = min(vocab_size, max(NUM_CANDIDATES, int(filters.top_k.max()) + 1))
    token_ids, is_settled = _draw_from_candidates(scaled, filters, uniform, num_candidates)
    open_rows = (~is_settled).nonzero()[:, 0]
    if len(open_rows):
        token_ids[open_rows], _ = _draw_from_candidates(
            scaled[open_rows], filters.select(open_rows), uniform[open_rows], vocab_size
        )
    return token_ids


def _draw_from_candidates(
    scaled: torch.Tensor, filters: Filters, uniform: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the `num_candidates` most likely tokens; the second result marks rows whose filters end among them."""
    values, candidate_ids = scaled.topk(num_candidates, dim=-1)
    rank = torch.arange(num_candidates, device=scaled.device)
    is_beyond_top_k = (filters.top_k[:, None] > 0) & (rank >= filters.top_k[:, None])

    # Top-p and min-p are measured against what top-k leaves over.
    has_top_k = filters.top_k > 0
    log_total = torch.where(
        has_top_k,
        values.masked_fill(is_beyond_top_k, float("-inf")).logsumexp(-1),
        scaled.logsumexp(-1),
    )
    probabilities = (values - log_total[:, None]).exp().masked_fill_(is_beyond_top_k, 0.0)
    mass_before = probabilities.cumsum(-1) - probabilities
    is_dropped = (
        is_beyond_top_k
        | ((mass_before >= filters.top_p[:, None]) & (rank > 0))
        | (probabilities < filters.min_p[:, None] * probabilities[:, :1])
    )
    kept = probabilities.masked_fill(is_dropped, 0.0)
    chosen = _invert(kept, uniform)
    return candidate_ids.gather(1, chosen[:, None])[:, 0], is_dropped[:, -1]


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index of the first cumulative weight above uniform x total, for each row of float32 [R, C]."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    chosen = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)[:, 0]
    # Rounding may place the threshold on the total itself: stay on the last token with weight.
    last_with_weight = torch.searchsorted(cumulative, total)[:, 0]
    return torch.minimum(chosen, last_with_weight)
