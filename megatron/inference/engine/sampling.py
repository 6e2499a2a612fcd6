"""Which token comes next, given the logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CANDIDATES = 128
"""Likeliest tokens that are put in order at first when tokens of some probability are wanted."""

_NOTHING_IS_DRAWN = 1e-4
"""Below this temperature the likeliest token is taken: float32 has no room for the quotient."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of one sequence are chosen. `greedy` overrides the rest.

    Args:
        temperature: logits are divided by it; next to nothing takes the likeliest token.
        top_k: choose among so many likeliest tokens; 0: all.
        top_p: choose among the likeliest tokens that together have this probability, a share of
            what top_k leaves; 0: all.
        top_p_decay: after each token top_p is multiplied by this; 0: it stays.
        top_p_bound: top_p does not fall below.
        min_p: choose among the tokens that are at least so probable as this share of the likeliest
            one's probability; 0: all.
        repetition_penalty: positive logits of tokens of the prompt and the text are divided by it,
            negative ones multiplied; 1: none.
        presence_penalty: subtracted from the logits of generated tokens.
        frequency_penalty: subtracted once for each time that the token was generated.
        logit_bias: pairs of a token and what is added to its logit.
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
    def takes_likeliest(self) -> bool:
        """Whether nothing is drawn."""
        return self.greedy or self.top_k == 1 or self.temperature < _NOTHING_IS_DRAWN

    def top_p_after(self, tokens: int) -> float:
        """Return the top_p of the token that comes after so many new ones."""
        if not self.top_p_decay:
            return self.top_p
        return max(self.top_p * self.top_p_decay**tokens, self.top_p_bound)


def choose_tokens(
    logits_bv: Tensor,
    samplings: Sequence[Sampling],
    draws: Sequence[float],
    lengths: Sequence[int],
) -> list[int]:
    """Return the next token of each row, whatever the other rows are.

    Args:
        draws: for each row a number from 0 to below 1 that decides; a likeliest token needs none.
        lengths: for each row the number of tokens chosen before.

    Shapes: logits_bv [b, V] float32, of real tokens only.
    Source: arXiv:1904.09751, section 3.1, for top_p; arXiv:2407.01082 for min_p.
    """
    chosen = [0] * len(samplings)
    greedy = [i for i, sampling in enumerate(samplings) if sampling.takes_likeliest]
    limits = [sampling.top_k or sampling.top_p or sampling.min_p for sampling in samplings]
    for rows, choose in (
        (greedy, _likeliest),
        ([i for i, limit in enumerate(limits) if not limit and i not in greedy], _among_all),
        ([i for i, limit in enumerate(limits) if limit and i not in greedy], _among_likeliest),
    ):
        if rows:
            own = logits_bv if len(rows) == len(samplings) else logits_bv[rows]
            found = choose(own, [(samplings[i], draws[i], lengths[i]) for i in rows])
            for i, token in zip(rows, found.tolist(), strict=True):
                chosen[i] = token
    return chosen


Wishes = Sequence[tuple[Sampling, float, int]]


def _likeliest(logits_bv: Tensor, wishes: Wishes) -> Tensor:
    return logits_bv.argmax(-1)


def _among_all(logits_bv: Tensor, wishes: Wishes) -> Tensor:
    return _draw(_tempered(logits_bv, wishes), wishes)


def _among_likeliest(logits_bv: Tensor, wishes: Wishes) -> Tensor:
    """Draw among the first tokens in the order of probability: so many, or of so much together."""
    logits_bv = _tempered(logits_bv, wishes)
    size, device = logits_bv.size(1), logits_bv.device
    counts_b1 = torch.tensor([[s.top_k or size] for s, *_ in wishes], device=device)
    masses_b1 = torch.tensor(
        [[s.top_p_after(length) if s.top_p else math.inf] for s, _, length in wishes],
        device=device,
    )
    distances_b1 = torch.tensor(
        [[-math.log(s.min_p) if s.min_p else math.inf] for s, *_ in wishes], device=device
    )
    whole_b1 = logits_bv.logsumexp(-1, keepdim=True)
    # To order the whole vocabulary would take longer than a small model's layers.
    count = max((s.top_k or _CANDIDATES) for s, *_ in wishes)
    while True:
        count = min(count, size)
        ordered_bn, order_bn = logits_bv.topk(count)
        is_beyond_bn = torch.arange(count, device=device) >= counts_b1
        # As transformers: with both limits, top_p is a share of what top_k has left.
        left_b1 = ordered_bn.masked_fill(is_beyond_bn, -torch.inf).logsumexp(-1, keepdim=True)
        total_b1 = torch.where(counts_b1 < size, left_b1, whole_b1)
        probability_bn = (ordered_bn - total_b1).exp()
        before_bn = probability_bn.cumsum(-1) - probability_bn
        is_rare_bn = ordered_bn[:, :1] - ordered_bn > distances_b1
        reached = (before_bn[:, -1:] >= masses_b1) | (counts_b1 <= count) | is_rare_bn[:, -1:]
        if count == size or reached.all():
            break
        count *= 8
    # What is likelier than a token decides about it, so that the likeliest always stays.
    cut_bn = (before_bn >= masses_b1) | is_beyond_bn | is_rare_bn
    cut_bn[:, 0] = False
    place_b = _draw(ordered_bn.masked_fill(cut_bn, -torch.inf), wishes)
    return order_bn.gather(1, place_b[:, None])[:, 0]


def _tempered(logits_bv: Tensor, wishes: Wishes) -> Tensor:
    temperatures = [sampling.temperature for sampling, *_ in wishes]
    if set(temperatures) == {1.0}:
        return logits_bv
    return logits_bv / torch.tensor(temperatures, device=logits_bv.device)[:, None]


def _draw(logits_bn: Tensor, wishes: Wishes) -> Tensor:
    """Return in each row the place where the running sum of probabilities passes the draw."""
    draws_b1 = torch.tensor(
        [[draw] for _, draw, _ in wishes], device=logits_bn.device, dtype=torch.float64
    )
    # In 64 bits: a sum over a large vocabulary rounds away what is unlikely.
    sums_bn = logits_bn.double().softmax(-1).cumsum(-1)
    whole_b1 = sums_bn[:, -1:]
    wanted_b1 = torch.minimum(draws_b1 * whole_b1, whole_b1.nextafter(torch.zeros_like(whole_b1)))
    return torch.searchsorted(sums_bn, wanted_b1, right=True)[:, 0]
