"""Logits processors: penalties, biases and forbidden tokens of each sequence, before sampling."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.inference.engine.sequence import ActiveSequence
from megatron.inference.runner.device import to_device

_Edit = tuple[int, int, float]
"""Row of the batch, token, amount."""


def process_logits(logits_bv: Tensor, sequences: Sequence[ActiveSequence]) -> Tensor:
    """Apply the penalties, logit_bias and forbidden tokens of each sequence to its row.

    The result of a row does not depend on the other rows.

    Shapes: logits_bv [b, V] float32, without padded columns -> the same.
    Source: arXiv:1909.05858, section 4.1, for repetition_penalty; OpenAI's API reference for
        presence_penalty, frequency_penalty and logit_bias.
    """
    factors = [*_repetition(sequences)]
    amounts = [*_presence_and_frequency(sequences), *_bias(sequences)]
    forbidden = [*_forbidden_tokens(sequences)]
    if not (factors or amounts or forbidden):
        return logits_bv
    logits_bv = logits_bv.clone()
    if factors:
        rows, tokens, factor = _columns(factors, logits_bv)
        picked = logits_bv[rows, tokens]
        logits_bv[rows, tokens] = torch.where(picked > 0, picked / factor, picked * factor)
    if amounts:
        rows, tokens, amount = _columns(amounts, logits_bv)
        # A token can have a penalty and a bias: both count.
        logits_bv.index_put_((rows, tokens), amount, accumulate=True)
    if forbidden:
        rows, tokens, infinity = _columns(forbidden, logits_bv)
        logits_bv[rows, tokens] = infinity
    return logits_bv


def _columns(edits: Sequence[_Edit], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens, amounts = zip(*edits, strict=True)
    return (
        to_device(rows, like.device),
        to_device(tokens, like.device),
        to_device(amounts, like.device, like.dtype),
    )


def _repetition(sequences: Sequence[ActiveSequence]) -> Iterator[_Edit]:
    """Yield a factor for each token of the prompt and of the generated tokens."""
    for row, sequence in enumerate(sequences):
        penalty = sequence.request.sampling.repetition_penalty
        if penalty != 1:
            yield from ((row, token, penalty) for token in sorted(set(sequence.tokens)))


def _presence_and_frequency(sequences: Sequence[ActiveSequence]) -> Iterator[_Edit]:
    """Yield the penalty of each generated token; the prompt does not count."""
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        if not (sampling.presence_penalty or sampling.frequency_penalty):
            continue
        for token, count in Counter(sequence.new_tokens).items():
            yield row, token, -sampling.presence_penalty - sampling.frequency_penalty * count


def _bias(sequences: Sequence[ActiveSequence]) -> Iterator[_Edit]:
    for row, sequence in enumerate(sequences):
        yield from ((row, token, bias) for token, bias in sequence.request.sampling.logit_bias)


def _forbidden_tokens(sequences: Sequence[ActiveSequence]) -> Iterator[_Edit]:
    """Yield -inf for stop tokens before min_new_tokens and for the second token of barred pairs."""
    for row, sequence in enumerate(sequences):
        request = sequence.request
        if sequence.num_new < request.min_new_tokens:
            yield from ((row, token, -torch.inf) for token in sorted(request.stop_tokens))
        for first, second in request.barred:
            if sequence.tokens[-1] == first:
                yield row, second, -torch.inf
