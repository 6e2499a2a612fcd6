"""Log-probabilities of chosen tokens and of the likeliest ones beside them."""

from collections.abc import Sequence

from torch import Tensor

from megatron.inference.engine.request import Choice


def choices_with_logprobs(
    log_probabilities_nv: Tensor, tokens: Sequence[int], top: Sequence[int]
) -> list[Choice]:
    """Return a Choice for each row: its token, and as many of the likeliest tokens as `top` says.

    Shapes: log_probabilities_nv [n, V], a row for each of the n tokens.
    """
    rows = range(len(tokens))
    own = log_probabilities_nv[[*rows], [*tokens]].tolist()
    likeliest = log_probabilities_nv.topk(min(max(top, default=0), log_probabilities_nv.size(1)))
    ids, values = likeliest.indices.tolist(), likeliest.values.tolist()
    return [
        Choice(
            token=tokens[row],
            logprob=own[row],
            top=tuple(zip(ids[row][: top[row]], values[row][: top[row]], strict=True)),
        )
        for row in rows
    ]
