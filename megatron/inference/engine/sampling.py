"""Sampling parameters (temperature, top-k, top-p, min-p), the sampler, and log-probabilities."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

_CANDIDATES = 128
"""Number of most likely tokens that top-p and min-p sort at first."""

_GREEDY_BELOW = 1e-4
"""Temperature below which sampling is greedy: logits / temperature would overflow float32."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one sequence. `greedy` overrides the rest.

    Args:
        temperature: divides the logits; close to 0 is greedy.
        top_k: sample from the k most likely tokens; 0: all.
        top_p: sample from the most likely tokens whose probabilities sum up to top_p (nucleus
            sampling), as a share of what top_k keeps; 0: all.
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


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token, with its log-probability before penalties, temperature and limits if requested.

    Args:
        top: the most likely tokens at this position, with their log-probabilities.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample_tokens(
    logits_bv: Tensor,
    samplings: Sequence[SamplingParams],
    draws: Sequence[float],
    lengths: Sequence[int],
    *,
    candidates: int = _CANDIDATES,
) -> list[int]:
    """Sample the next token of each row, independently of the other rows.

    Args:
        draws: a uniform random number in [0, 1) for each row; greedy rows ignore it.
        lengths: number of tokens generated before, for each row.
        candidates: see `limit_logits`.

    Shapes: logits_bv [b, V] float32, of real tokens only.
    Source: arXiv:1904.09751, section 3.1, for top_p; arXiv:2407.01082 for min_p.
    """
    chosen = [0] * len(samplings)
    greedy = [i for i, sampling in enumerate(samplings) if sampling.is_greedy]
    limits = [sampling.top_k or sampling.top_p or sampling.min_p for sampling in samplings]
    for selected, sample in (
        (greedy, _argmax),
        ([i for i, limit in enumerate(limits) if not limit and i not in greedy], _sample_from_all),
        (
            [i for i, limit in enumerate(limits) if limit and i not in greedy],
            partial(_sample_from_top, candidates=candidates),
        ),
    ):
        if selected:
            own = logits_bv if len(selected) == len(samplings) else logits_bv[selected]
            tokens = sample(own, [(samplings[i], draws[i], lengths[i]) for i in selected])
            for i, token in zip(selected, tokens.tolist(), strict=True):
                chosen[i] = token
    return chosen


_Rows = Sequence[tuple[SamplingParams, float, int]]
"""Sampling parameters, random draw and number of generated tokens of each row."""


def _argmax(logits_bv: Tensor, rows: _Rows) -> Tensor:
    return logits_bv.argmax(-1)


def _sample_from_all(logits_bv: Tensor, rows: _Rows) -> Tensor:
    return _draw(_tempered(logits_bv, rows), rows)


def _sample_from_top(logits_bv: Tensor, rows: _Rows, *, candidates: int) -> Tensor:
    """Sample with top-k, top-p or min-p: from the first tokens in order of probability."""
    samplings, lengths = [s for s, *_ in rows], [length for *_, length in rows]
    ordered_bn, order_bn = limit_logits(
        _tempered(logits_bv, rows), samplings, lengths, candidates=candidates
    )
    return order_bn.gather(1, _draw(ordered_bn, rows)[:, None])[:, 0]


def limit_logits(
    logits_bv: Tensor,
    samplings: Sequence[SamplingParams],
    lengths: Sequence[int],
    *,
    candidates: int = _CANDIDATES,
) -> tuple[Tensor, Tensor]:
    """Apply top-k, top-p and min-p: return the largest logits in descending order, and their tokens.

    Args:
        lengths: number of tokens generated before, for each row.
        candidates: number of logits that are sorted at first; more if these are not enough.

    Shapes: logits_bv [b, V] -> [b, n] with -inf for excluded tokens, and [b, n].
    """
    size, device = logits_bv.size(1), logits_bv.device
    counts_b1 = torch.tensor([[s.top_k or size] for s in samplings], device=device)
    masses_b1 = torch.tensor(
        [
            [s.top_p_after(length) if s.top_p else math.inf]
            for s, length in zip(samplings, lengths, strict=True)
        ],
        device=device,
    )
    distances_b1 = torch.tensor(
        [[-math.log(s.min_p) if s.min_p else math.inf] for s in samplings], device=device
    )
    full_b1 = logits_bv.logsumexp(-1, keepdim=True)
    # Sorting the full vocabulary would take longer than a small model's layers.
    count = max((s.top_k or candidates) for s in samplings)
    while True:
        count = min(count, size)
        ordered_bn, order_bn = logits_bv.topk(count)
        is_beyond_bn = torch.arange(count, device=device) >= counts_b1
        # As transformers: with both limits, top_p is a share of what top_k keeps.
        kept_b1 = ordered_bn.masked_fill(is_beyond_bn, -torch.inf).logsumexp(-1, keepdim=True)
        total_b1 = torch.where(counts_b1 < size, kept_b1, full_b1)
        probability_bn = (ordered_bn - total_b1).exp()
        before_bn = probability_bn.cumsum(-1) - probability_bn
        is_rare_bn = ordered_bn[:, :1] - ordered_bn > distances_b1
        reached = (before_bn[:, -1:] >= masses_b1) | (counts_b1 <= count) | is_rare_bn[:, -1:]
        if count == size or reached.all():
            break
        count *= 8
    # A token is cut by the probabilities of more likely ones; the most likely token always stays.
    cut_bn = (before_bn >= masses_b1) | is_beyond_bn | is_rare_bn
    cut_bn[:, 0] = False
    return ordered_bn.masked_fill(cut_bn, -torch.inf), order_bn


def _tempered(logits_bv: Tensor, rows: _Rows) -> Tensor:
    temperatures = [sampling.temperature for sampling, *_ in rows]
    if set(temperatures) == {1.0}:
        return logits_bv
    return logits_bv / torch.tensor(temperatures, device=logits_bv.device)[:, None]


def _draw(logits_bn: Tensor, rows: _Rows) -> Tensor:
    """Return the index in each row at which the cumulative probability exceeds the draw."""
    draws_b1 = torch.tensor(
        [[draw] for _, draw, _ in rows], device=logits_bn.device, dtype=torch.float64
    )
    # In float64: a float32 sum over a large vocabulary loses unlikely tokens.
    sums_bn = logits_bn.double().softmax(-1).cumsum(-1)
    total_b1 = sums_bn[:, -1:]
    wanted_b1 = torch.minimum(draws_b1 * total_b1, total_b1.nextafter(torch.zeros_like(total_b1)))
    return torch.searchsorted(sums_bn, wanted_b1, right=True)[:, 0]


def with_logprobs(
    log_probabilities_nv: Tensor, tokens: Sequence[int], top: Sequence[int]
) -> list[TokenLogprob]:
    """Return the log-probability of each row's token, and its `top` most likely tokens.

    Shapes: log_probabilities_nv [n, V], a row for each of the n tokens.
    """
    rows = range(len(tokens))
    own = log_probabilities_nv[[*rows], [*tokens]].tolist()
    most_likely = log_probabilities_nv.topk(min(max(top, default=0), log_probabilities_nv.size(1)))
    ids, values = most_likely.indices.tolist(), most_likely.values.tolist()
    return [
        TokenLogprob(
            token=tokens[row],
            logprob=own[row],
            top=tuple(zip(ids[row][: top[row]], values[row][: top[row]], strict=True)),
        )
        for row in rows
    ]
