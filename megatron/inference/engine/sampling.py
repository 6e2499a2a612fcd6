"""Sampling parameters (temperature, top-k, top-p, min-p), the sampler, and log-probabilities."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.inference.runner.device import to_device

_CANDIDATES = 128
"""Number of most likely tokens that top-p and min-p sort at first."""

_WIDENING = 8
"""Factor on that number when they are too few."""

_GREEDY_BELOW = 1e-4
"""Temperature below which sampling is greedy: logits / temperature would overflow float32."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one sequence. `greedy` overrides the rest.

    Args:
        temperature: divides the logits; close to 0 is greedy.
        top_k: sample from the k most likely tokens; 0: all.
        top_p: sample from the most likely tokens whose probabilities sum up to top_p (nucleus
            sampling), as a share of the tokens that top_k keeps; 0: all.
        top_p_decay: factor on top_p after each generated token; 0: constant.
        top_p_bound: lower bound of the decayed top_p.
        min_p: sample from the tokens whose probability is at least this share of the largest
            probability; 0: all.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in the
            prompt or the generated text; 1: none.
        presence_penalty: subtracted from the logits of tokens that were generated before.
        frequency_penalty: subtracted once for each time that the token was generated.
        logit_bias: pairs of a token and the value added to its logit.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen, without a random draw."""
        return self.greedy or self.top_k == 1 or self.temperature < _GREEDY_BELOW

    def top_p_after(self, tokens: int) -> float:
        """Return top_p, decayed over the number of generated `tokens`."""
        if not self.top_p_decay:
            return self.top_p
        return max(self.top_p * self.top_p_decay**tokens, self.top_p_bound)


Score = Callable[[Tensor], Tensor]
"""Computes columns [b, n], bool or float64, for the host from the sampled tokens [b]."""


def mask_nonfinite(logits_bv: Tensor) -> tuple[Tensor, Tensor]:
    """Replace rows with NaN or infinite logits by zeros.

    Shapes: [b, V] -> [b, V], and [b, 1] bool: whether the row was finite.
    """
    is_finite_b1 = logits_bv.isfinite().all(1, keepdim=True)
    return logits_bv.masked_fill(~is_finite_b1, 0.0), is_finite_b1


def sample_tokens(
    logits_bv: Tensor,
    samplings: Sequence[SamplingParams],
    draws: Sequence[float],
    lengths: Sequence[int],
    score: Score | None = None,
    *,
    candidates: int = _CANDIDATES,
) -> list[list[float]]:
    """Sample the next token of each row, independently of other rows; return [token, *columns].

    Tokens and columns of all rows come to the host in one copy, the only sync; it is repeated if
    top-p or min-p keeps more tokens than were sorted.

    Args:
        draws: a uniform random number in [0, 1) for each row; greedy rows ignore it.
        lengths: number of tokens generated before, for each row.
        score: computes the columns.
        candidates: see `limit_logits`.

    Shapes: logits_bv [b, V] float32, of real tokens only.
    Source: arXiv:1904.09751, section 3.1, for top_p; arXiv:2407.01082 for min_p.
    """
    rows = [*zip(samplings, draws, lengths, strict=True)]
    while True:
        tokens_b, is_final_b = _sample(logits_bv, rows, candidates)
        columns = [tokens_b[:, None], is_final_b[:, None]]
        if score:
            columns.append(score(tokens_b))
        fetched = torch.cat(columns, 1).tolist()  # of the widest dtype
        if all(is_final for _, is_final, *_ in fetched):
            return [[token, *scores] for token, _, *scores in fetched]
        candidates *= _WIDENING


_Rows = Sequence[tuple[SamplingParams, float, int]]
"""Sampling parameters, random draw and number of generated tokens of each row."""


def _sample(logits_bv: Tensor, rows: _Rows, candidates: int) -> tuple[Tensor, Tensor]:
    """Return the token of each row, and whether enough logits were sorted for it."""
    device = logits_bv.device
    tokens_b = torch.zeros(len(rows), dtype=torch.int64, device=device)
    is_final_b = torch.ones(len(rows), dtype=torch.bool, device=device)
    methods = [_method(sampling) for sampling, *_ in rows]
    for method in dict.fromkeys(methods):
        selected = [i for i, own in enumerate(methods) if own is method]
        if len(selected) == len(rows):
            return method(logits_bv, rows, candidates)
        index = to_device(selected, device)
        tokens, is_final = method(
            logits_bv.index_select(0, index), [rows[i] for i in selected], candidates
        )
        tokens_b.index_copy_(0, index, tokens)
        is_final_b.index_copy_(0, index, is_final)
    return tokens_b, is_final_b


def _method(sampling: SamplingParams) -> Callable[[Tensor, _Rows, int], tuple[Tensor, Tensor]]:
    if sampling.is_greedy:
        return _argmax
    has_limit = sampling.top_k or sampling.top_p or sampling.min_p
    return _sample_from_top if has_limit else _sample_from_all


def _argmax(logits_bv: Tensor, rows: _Rows, candidates: int) -> tuple[Tensor, Tensor]:
    return _final(logits_bv.argmax(-1))


def _sample_from_all(logits_bv: Tensor, rows: _Rows, candidates: int) -> tuple[Tensor, Tensor]:
    return _final(_draw(_apply_temperature(logits_bv, rows), rows))


def _final(tokens_b: Tensor) -> tuple[Tensor, Tensor]:
    return tokens_b, torch.ones_like(tokens_b, dtype=torch.bool)


def _sample_from_top(logits_bv: Tensor, rows: _Rows, candidates: int) -> tuple[Tensor, Tensor]:
    """Sample with top-k, top-p or min-p: from the first tokens in order of probability."""
    samplings, lengths = [s for s, *_ in rows], [length for *_, length in rows]
    ordered_bn, order_bn, is_final_b = limit_logits(
        _apply_temperature(logits_bv, rows), samplings, lengths, candidates=candidates
    )
    return order_bn.gather(1, _draw(ordered_bn, rows)[:, None])[:, 0], is_final_b


def limit_logits(
    logits_bv: Tensor,
    samplings: Sequence[SamplingParams],
    lengths: Sequence[int],
    *,
    candidates: int = _CANDIDATES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply top-k, top-p and min-p to the largest logits.

    Returns logits in descending order, their tokens, and whether all other tokens are excluded.

    Args:
        lengths: number of tokens generated before, for each row.
        candidates: number of logits to sort for rows without top-k.

    Shapes: logits_bv [b, V] -> [b, n] with -inf for excluded tokens, [b, n], and [b] bool.
    """
    size, device = logits_bv.size(1), logits_bv.device
    counts_b1 = to_device([[s.top_k or size] for s in samplings], device)
    masses_b1 = to_device(
        [
            [s.top_p_after(length) if s.top_p else math.inf]
            for s, length in zip(samplings, lengths, strict=True)
        ],
        device,
    )
    distances_b1 = to_device(
        [[-math.log(s.min_p) if s.min_p else math.inf] for s in samplings], device
    )
    full_b1 = logits_bv.logsumexp(-1, keepdim=True)
    # Sorting the full vocabulary would take longer than a small model's layers.
    count = min(max((s.top_k or candidates) for s in samplings), size)
    ordered_bn, order_bn = logits_bv.topk(count)
    is_beyond_bn = torch.arange(count, device=device) >= counts_b1
    # As transformers: with both limits, top_p is a share of the tokens that top_k keeps.
    kept_b1 = ordered_bn.masked_fill(is_beyond_bn, -torch.inf).logsumexp(-1, keepdim=True)
    total_b1 = torch.where(counts_b1 < size, kept_b1, full_b1)
    probability_bn = (ordered_bn - total_b1).exp()
    before_bn = probability_bn.cumsum(-1) - probability_bn
    is_rare_bn = ordered_bn[:, :1] - ordered_bn > distances_b1
    is_final_b1 = (before_bn[:, -1:] >= masses_b1) | (counts_b1 <= count) | is_rare_bn[:, -1:]
    # A token is cut by the probabilities of more likely ones; the most likely token always stays.
    cut_bn = (before_bn >= masses_b1) | is_beyond_bn | is_rare_bn
    cut_bn[:, 0].fill_(False)
    return ordered_bn.masked_fill(cut_bn, -torch.inf), order_bn, is_final_b1[:, 0]


def _apply_temperature(logits_bv: Tensor, rows: _Rows) -> Tensor:
    temperatures = [sampling.temperature for sampling, *_ in rows]
    if set(temperatures) == {1.0}:
        return logits_bv
    return logits_bv / to_device(temperatures, logits_bv.device)[:, None]


def _draw(logits_bn: Tensor, rows: _Rows) -> Tensor:
    """Return the index in each row at which the cumulative probability exceeds the draw."""
    draws_b1 = to_device([[draw] for _, draw, _ in rows], logits_bn.device, torch.float64)
    # In float64: a float32 sum over a large vocabulary loses unlikely tokens.
    sums_bn = logits_bn.double().softmax(-1).cumsum(-1)
    total_b1 = sums_bn[:, -1:]
    wanted_b1 = torch.minimum(draws_b1 * total_b1, total_b1.nextafter(torch.zeros_like(total_b1)))
    return torch.searchsorted(sums_bn, wanted_b1, right=True)[:, 0]
