"""Masks of BERT and T5: n-grams of whole words, in the order and by the draws of Megatron-LM."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.data.sampling.provenance import OneToOne, TracedSource
from megatron.extensions.masked_lm.flags import MaskedLMPlan
from megatron.tokenizer.types.tokenizer import Role, Tokenizer

_SEEDS = 1 << 32


@dataclass(frozen=True)
class MaskingVocabulary:
    """Properties of the tokenizer that masking needs.

    Args:
        name: the tokenizer's name in messages.
        never_masked: ids of [CLS] and [SEP], where the tokenizer has them.
        continues_word: whether the token of each id goes on with a word (## of WordPiece).
        ids: those that random tokens are drawn from, in order.

    Shapes: continues_word [vocab_size] bool; ids [tokens] int64.
    """

    name: str
    special: dict[Role, int]
    sentinels: tuple[int, ...]
    never_masked: tuple[int, ...]
    continues_word: NDArray[np.bool_]
    ids: NDArray[np.int64]

    @classmethod
    def of(cls, tokenizer: Tokenizer, *roles: Role | tuple[Role, ...]) -> "MaskingVocabulary":
        """Return the vocabulary of `tokenizer`.

        Args:
            roles: the roles that are needed; of a tuple, the first that the tokenizer has.

        Raises:
            DataError: it has no special token of one of `roles`.
        """
        choices = [(role,) if isinstance(role, str) else role for role in roles]
        texts = list(tokenizer.vocabulary().tokens)
        texts += [""] * (tokenizer.vocab_size - len(texts))
        has_texts = any(texts)
        return cls(
            name=tokenizer.name,
            special={
                each[0]: tokenizer.special(
                    next((role for role in each if role in tokenizer.special_ids), each[0])
                )
                for each in choices
            },
            sentinels=tuple(tokenizer.extra_ids),
            never_masked=tuple(
                tokenizer.special_ids[role]
                for role in ("cls", "sep")
                if role in tokenizer.special_ids
            ),
            continues_word=np.array([text.startswith("##") for text in texts]),
            ids=np.array([i for i, text in enumerate(texts) if text or not has_texts]),
        )


class MaskedDataset(OneToOne):
    """Base of masked samples of a SentenceDataset.

    Args:
        dataset: blended and ordered as it is trained on.

    Randomness: numpy.random.RandomState(seed + number of the sample in its corpus).
    """

    def __init__(
        self, dataset: TracedSource, *, plan: MaskedLMPlan, vocabulary: MaskingVocabulary, seed: int
    ):
        super().__init__(dataset)
        self._plan, self._vocabulary, self._seed = plan, vocabulary, seed
        self._rng = np.random.RandomState(0)


def seed_for_sample(rng: np.random.RandomState, seed: int, index: int) -> np.random.RandomState:
    """Seed `rng` for the sample `index` of a corpus; return it."""
    rng.seed((seed + index) % _SEEDS)
    return rng


def masked_ngrams(
    tokens: NDArray[np.int64],
    target_length: int,
    vocabulary: MaskingVocabulary,
    *,
    mask_prob: float,
    draw_words: Callable[[], int],
    rng: np.random.RandomState,
) -> Iterator[list[int]]:
    """Yield the positions of each n-gram to be masked; the caller draws between two of them.

    Words are taken in random order, each with some that follow it, until the share is reached. A
    target so short that the share is less than one token has none.

    Args:
        draw_words: draws the number of words of an n-gram.

    Raises:
        DataError: a token is not of the vocabulary.

    Randomness: a shuffle of the words, then `draw_words` for each that is looked at.
    Source: Megatron-LM's create_masked_lm_predictions.
    """
    positions, bounds = _words(tokens, vocabulary)
    num_words = len(bounds) - 1
    budget = min(mask_prob * target_length, max(1, round(len(tokens) * mask_prob)))
    order = np.arange(num_words)
    rng.shuffle(order)
    is_taken = bytearray(len(positions))
    taken = 0
    for word in order.tolist():
        if taken >= budget:
            return
        stop = min(word + draw_words(), num_words)
        first, last = bounds[word], bounds[stop]
        while stop > word + 1 and taken + last - first > budget:
            stop -= 1
            last = bounds[stop]
        if taken + last - first > budget or is_taken.find(1, first, last) >= 0:
            continue
        is_taken[first:last] = b"\1" * (last - first)
        taken += last - first
        yield positions[first:last]


def _words(tokens: NDArray[np.int64], vocabulary: MaskingVocabulary) -> tuple[list[int], list[int]]:
    """Return the positions of tokens that may be masked, and where among them words begin.

    A piece that continues a word belongs to the word before it, even after a [SEP].
    """
    may_be = np.ones(len(tokens), bool)
    for token in vocabulary.never_masked:
        may_be &= tokens != token
    positions = np.flatnonzero(may_be)
    if len(tokens) and tokens.max() >= len(vocabulary.continues_word):
        raise DataError(
            f"a sample holds the token {tokens.max()}, and the tokenizer {vocabulary.name} has "
            f"{len(vocabulary.continues_word)} tokens: the data were made with another tokenizer"
        )
    begins = ~vocabulary.continues_word[tokens[positions]]
    begins[:1] = True
    bounds = np.flatnonzero(begins).tolist()
    return positions.tolist(), [*bounds, len(positions)]
