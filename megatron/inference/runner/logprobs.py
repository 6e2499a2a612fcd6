"""Log-probabilities of tokens: columns of numbers for the host, and what they say."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token, with its log-probability before penalties, temperature and limits if requested.

    Args:
        top: the most likely tokens at this position, with their log-probabilities.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def logprob_columns(logits_nv: Tensor, tokens_n: Tensor, top: int) -> Tensor:
    """Return the log-probability of each row's token, and its most likely tokens, for the host.

    Shapes: logits_nv [n, V] -> [n, 1 + 2 * top] float64: log-probability, tokens, their
        log-probabilities.
    """
    log_probabilities_nv = logits_nv.log_softmax(-1)
    own_n1 = log_probabilities_nv.gather(1, tokens_n[:, None])
    most_likely = log_probabilities_nv.topk(min(top, logits_nv.size(1)))
    return torch.cat([own_n1.double(), most_likely.indices, most_likely.values], 1)


def read_logprobs(token: int, columns: Sequence[float], top: int) -> TokenLogprob:
    """Return a token with its log-probability and `top` most likely tokens.

    Args:
        columns: a row of `logprob_columns`.
    """
    chosen, *most_likely = columns
    half = len(most_likely) // 2
    ids, values = most_likely[:half][:top], most_likely[half:][:top]
    return TokenLogprob(
        token=token, logprob=chosen, top=tuple(zip(map(int, ids), values, strict=True))
    )
