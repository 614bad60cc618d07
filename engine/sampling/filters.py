"""Draws tokens from filtered distributions: temperature, then top-k, top-p and min-p.

Each filter keeps the tokens whose logit reaches a threshold, so together they are one threshold per
row: top-k's is the k-th largest logit (tokens tied with it stay), top-p's the largest one whose tokens
hold the mass p of what top-k leaves, min-p's lies ln(min_p) · temperature below the largest logit.
The token is then found by inverting the cumulative distribution of the kept tokens, in the order of
the vocabulary, at the row's uniform number.

Probabilities are whole numbers, multiples of 2^-40 of the likeliest token's.  Their sums do not depend
on the order of addition, so a row's token depends on its own logits and number alone: never on the
rest of the batch, and between devices only on how they round exp.  In plain torch, for the CPU;
`engine.kernels.sample` does the same on a GPU.
"""

from __future__ import annotations

import torch

from engine.sampling.settings import StepSettings

NUM_CANDIDATES = 256
LIKELIEST_WEIGHT = float(1 << 40)
# Logits are confined to this range, which keeps their differences finite; NaN counts as impossible.
LOGIT_LIMIT = 1e30
_CHUNK = 1024


def choose(logits: torch.Tensor, settings: StepSettings) -> torch.Tensor:
    """One token id for every row of logits [N, V]: the likeliest of greedy rows, a drawn one of others; int64 [N]."""
    is_drawing = settings.draws[:, 0] > 0
    if bool(is_drawing.all()):
        return draw(logits, settings.draws)
    token_ids = logits.argmax(-1)
    token_ids[is_drawing] = draw(logits[is_drawing], settings.draws[is_drawing])
    return token_ids


def draw(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Draw one token id per row: logits [R, V], draws float64 [R, 6] (`StepSettings.draws`) -> int64 [R].

    float32 logits may be overwritten.
    """
    scores = _Scores(logits, draws)
    is_searching = draws[:, 5] > 0
    if not bool(is_searching.any()):
        return scores.draw(scores.floor)
    token_ids = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    if not bool(is_searching.all()):
        free = scores.select(~is_searching)
        token_ids[~is_searching] = free.draw(free.floor)
        scores = scores.select(is_searching)
    token_ids[is_searching] = _draw_within_limits(scores)
    return token_ids


def thresholds(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The smallest logit each row keeps, float32 [R], by sorting whole rows; arguments as of `draw`."""
    scores = _Scores(logits, draws)
    return _Candidates(scores, scores.logits.sort(-1, descending=True).values).threshold


class _Scores:
    """Rows of logits with their settings; what is [R, 1] here is one number per row."""

    def __init__(self, logits: torch.Tensor, draws: torch.Tensor) -> None:
        self._draws = draws
        self.logits = logits.float()
        self.peak = self.logits.amax(-1, keepdim=True)
        if not bool((self.peak.abs() <= LOGIT_LIMIT).all()):
            self.logits = self.logits.nan_to_num(-LOGIT_LIMIT).clamp(-LOGIT_LIMIT, LOGIT_LIMIT)
            self.peak = self.logits.amax(-1, keepdim=True)
        inverse_temperature, top_k, top_p, reach, uniform, _ = draws.unsqueeze(-1).unbind(1)
        self.inverse_temperature = inverse_temperature.float()
        self.top_k = top_k.long()
        self.top_p = top_p
        self.floor = self.peak + reach.float()
        self.uniform = uniform

    def select(self, rows: torch.Tensor) -> _Scores:
        return _Scores(self.logits[rows], self._draws[rows])

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        """exp of the scaled logits [R, C] relative to the row's largest, in units of 2^-40, as whole float32."""
        return _weigh(logits - self.peak, self.inverse_temperature)

    def total_weight(self) -> torch.Tensor:
        """int64 [R, 1]; row by row, which needs little memory and finds it in the cache."""
        totals = []
        for logits, peak, inverse_temperature in zip(self.logits, self.peak, self.inverse_temperature, strict=True):
            weights = _weigh(logits - peak, inverse_temperature)
            totals.append(_chunk_sums(weights[None]).sum(-1))
        return torch.stack(totals)

    def draw(self, threshold: torch.Tensor) -> torch.Tensor:
        """Draw from the tokens whose logit reaches the threshold [R, 1]: first a chunk of them, then one of it.

        The logits are overwritten, since fresh memory of their size would cost as much as the arithmetic.
        """
        if bool((threshold > -LOGIT_LIMIT).any()):
            self.logits.masked_fill_(self.logits < threshold, float("-inf"))
        weights = _weigh(self.logits.sub_(self.peak), self.inverse_temperature)
        until_chunk = _chunk_sums(weights).cumsum(-1)
        target = _target(self.uniform, until_chunk[:, -1:])
        chunk = torch.searchsorted(until_chunk, target, right=True)
        token_ids = chunk * _CHUNK + torch.arange(_CHUNK, device=chunk.device)
        vocab_size = weights.shape[1]
        chosen_chunk = weights.gather(1, token_ids.clamp(max=vocab_size - 1)).long()
        chosen_chunk.masked_fill_(token_ids >= vocab_size, 0)
        until_token = chosen_chunk.cumsum(-1)
        target -= until_chunk.gather(1, chunk) - until_token[:, -1:]
        return (chunk * _CHUNK + torch.searchsorted(until_token, target, right=True))[:, 0]


class _Candidates:
    """The largest logits of each row, and the threshold of all filters if it lies among them.

    `is_settled` marks the rows whose kept tokens are all candidates.
    """

    def __init__(self, scores: _Scores, values: torch.Tensor) -> None:
        """`values` float32 [R, C], falling."""
        num_candidates, vocab_size = values.shape[1], scores.logits.shape[1]
        has_top_k = scores.top_k < vocab_size
        last = (scores.top_k - 1).clamp(max=num_candidates - 1)
        top_k_threshold = values.gather(1, last).where(has_top_k, -LOGIT_LIMIT)

        # Top-p is measured against what top-k leaves over.
        weights = scores.weights(values).long().masked_fill_(values < top_k_threshold, 0)
        total = weights.sum(-1, keepdim=True)
        if num_candidates < vocab_size and not bool(has_top_k.all()):
            total = torch.where(has_top_k, total, scores.total_weight())
        target = _target(scores.top_p, total).clamp_(min=1)
        reaching = torch.searchsorted(weights.cumsum(-1), target).clamp_(max=num_candidates - 1)
        top_p_threshold = values.gather(1, reaching).where(scores.top_p < 1.0, -LOGIT_LIMIT)

        self.threshold = torch.maximum(torch.maximum(top_k_threshold, top_p_threshold), scores.floor)
        self.weights = weights.masked_fill_(values < self.threshold, 0)
        self.is_settled = (self.threshold > values[:, -1:])[:, 0]


def _draw_within_limits(scores: _Scores) -> torch.Tensor:
    """Draw in rows that top-k or top-p limits: few of their candidates are kept, or else the whole row is sorted."""
    vocab_size = scores.logits.shape[1]
    num_candidates = min(
        vocab_size, max(NUM_CANDIDATES, int(scores.top_k.where(scores.top_k < vocab_size, 0).max()) + 1)
    )
    values, ids = scores.logits.topk(num_candidates, dim=-1)
    candidates = _Candidates(scores, values)
    ids, order = ids.sort(-1)
    cumulative = candidates.weights.gather(1, order).cumsum(-1)
    chosen = torch.searchsorted(cumulative, _target(scores.uniform, cumulative[:, -1:]), right=True)
    token_ids = ids.gather(1, chosen.clamp_(max=num_candidates - 1))[:, 0]
    is_open = ~candidates.is_settled
    if bool(is_open.any()):
        rest = scores.select(is_open)
        sorted_logits = rest.logits.sort(-1, descending=True).values
        token_ids[is_open] = rest.draw(_Candidates(rest, sorted_logits).threshold)
    return token_ids


def _weigh(distances: torch.Tensor, inverse_temperature: torch.Tensor) -> torch.Tensor:
    """Overwrites float32 distances from the largest logit with their tokens' weights."""
    return distances.mul_(inverse_temperature).exp_().mul_(LIKELIEST_WEIGHT).floor_()


def _chunk_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums of each chunk of weights [R, V], int64 [R, chunks]; float64 holds them exactly."""
    whole = weights.shape[1] // _CHUNK * _CHUNK
    sums = weights[:, :whole].unflatten(1, (-1, _CHUNK)).sum(-1, dtype=torch.float64)
    rest = weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
    return torch.cat((sums, rest), dim=1).long()


def _target(share: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """`share` float64 of `total` int64, as a whole number below it (or equal, for a share of 1)."""
    return torch.minimum((share * total.double()).long(), total - (share < 1.0).long())
