"""Draft tokens of speculative decoding by prompt lookup: what followed the latest n-gram before.

A sequence often repeats itself, or its prompt. One pass computes the logits behind a draft's tokens; those
are kept that sampling chooses too, so that the output is the one without drafts.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from megatron.inference.runner.logprobs import TokenLogprob

_SIZES = (3, 2)
"""Tokens of the n-grams that are looked up, in this order."""


class NgramIndex:
    """Index of the n-grams of one sequence, which grows with the sequence.

    Source: arXiv:2304.04487, section 3, for drafts copied from the text itself.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens that may come next; none if the latest n-grams are new.

        A draft that reaches the end of the sequence goes on with its own beginning.

        Args:
            tokens: the sequence so far: that of the last call and further tokens.
        """
        for end in range(self._num_indexed, len(tokens)):  # each followed by tokens[end]
            for size in _SIZES:
                if end >= size:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._num_indexed = len(tokens)
        for size in _SIZES:
            if start := self._ends.get(tuple(tokens[-size:])):
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(count)]
        return []


def accepted_tokens(
    sampled: Sequence[TokenLogprob | None], drafts: Sequence[Sequence[int]]
) -> Iterator[list[TokenLogprob | None]]:
    """Yield the new tokens of each sequence: sampled ones up to the first that differs from its draft.

    No tokens where a draft has NaN: masked NaN reaches the logits before it, so that the sequence must
    decode its next token again, without a draft.

    Args:
        sampled: for each sequence the token before its draft's first one, and behind each of its
            draft's tokens.
    """
    tokens = iter(sampled)
    for draft in drafts:
        own = [*islice(tokens, len(draft) + 1)]
        if draft and None in own:
            yield []
            continue
        equal = (
            new is not None and new.token == token for new, token in zip(own, draft, strict=False)
        )
        yield own[: next((i for i, same in enumerate(equal) if not same), len(draft)) + 1]
