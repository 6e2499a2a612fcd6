"""Which token comes next, given the logits."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. `greedy` overrides the rest; top_k and top_p exclude each other."""

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 0.0  # 0: all


def sampling_problems(sampling: Sampling, *, vocab_size: int) -> Iterator[str]:
    """Yield every reason why tokens cannot be chosen so."""
    if sampling.temperature <= 0:
        yield f"--temperature {sampling.temperature} must be more than 0; --greedy takes the likeliest"
    if not 0 <= sampling.top_k <= vocab_size:
        yield f"--top_k {sampling.top_k} must be between 0 and the vocabulary's {vocab_size} tokens"
    if not 0 <= sampling.top_p <= 1:
        yield f"--top_p {sampling.top_p} must be between 0 and 1"
    if sampling.greedy and (sampling.top_k or sampling.top_p or sampling.temperature != 1):
        yield "--greedy takes the likeliest token: leave --top_k, --top_p and --temperature out"
    if sampling.top_k and sampling.top_p:
        yield "--top_k and --top_p exclude each other: give one of them"


def choose_tokens(logits_bv: Tensor, sampling: Sampling, *, vocab_size: int) -> Tensor:
    """Return the next token of each row.

    Rows of the padded vocabulary that no token has are never chosen.

    Shapes: logits_bv [b, V] float -> [b] int64.
    Randomness: draws from the ordinary stream, unless greedy.
    Source: arXiv:1904.09751, section 3.1, for top_p.
    """
    logits_bv = logits_bv[:, :vocab_size].float()
    if sampling.greedy or sampling.top_k == 1:
        return logits_bv.argmax(-1)
    logits_bv = logits_bv / sampling.temperature
    if sampling.top_k:
        kth = logits_bv.topk(sampling.top_k).values[:, -1:]
        logits_bv = logits_bv.masked_fill(logits_bv < kth, -torch.inf)
    elif sampling.top_p:
        logits_bv = _nucleus(logits_bv, sampling.top_p)
    return torch.multinomial(logits_bv.softmax(-1), 1).squeeze(-1)


def _nucleus(logits_bv: Tensor, top_p: float) -> Tensor:
    """Return the logits with all but the likeliest tokens of total probability `top_p` at -inf."""
    ordered, order = logits_bv.sort(descending=True)
    probability = ordered.softmax(-1)
    # What is likelier than a token decides about it, so that the likeliest always stays.
    before = probability.cumsum(-1) - probability
    ordered = ordered.masked_fill(before >= top_p, -torch.inf)
    return ordered.gather(-1, order.argsort(-1))
