"""Samples of BERT: two segments of a document in one order or the other, some of it masked."""

from bisect import bisect_right
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectivePlan
from megatron.data.datasets.run_datasets import View
from megatron.extensions.masked_lm.data_masking import (
    MaskedDataset,
    MaskingVocabulary,
    masked_ngrams,
    seed_for_sample,
)
from megatron.tokenizer.types.tokenizer import Tokenizer

_NGRAM_SHARES = 1.0 / np.arange(1, 4)
_NGRAM_CDF = ((_NGRAM_SHARES / _NGRAM_SHARES.sum()).cumsum()).tolist()


class BertDataset(MaskedDataset):
    """Masked language modelling and sentence order prediction on samples of a SentenceDataset.

    [CLS] A [SEP] B [SEP], where the sentences of A precede B's in the document or, when
    `is_random` is 1, follow them. Without binary head [CLS] A [SEP]. Of the tokens chosen for
    prediction 80 % become [MASK], 10 % another token, 10 % stay.

    Shapes: dataset[i] -> {"text", "types", "labels", "loss_mask", "padding_mask": [seq_length],
        "is_random", "truncated": []} int64. Labels are -1 where nothing is predicted, which may be
        everywhere: a sample of six tokens has no masked one.
    Source: BigScience's Megatron-DeepSpeed, whose samples these are. Megatron Core differs where a
        random token happens to be [PAD]: it leaves a hole in the padding mask there.
    """

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        sample = self.dataset[i]
        tokens, target = sample["tokens"], int(sample["target_length"])
        rng = seed_for_sample(self._rng, self._seed, int(sample["index"]))
        if self._plan.has_binary_head:
            first, second, is_swapped = _segments(tokens, sample["sizes"], rng)
        else:
            first, second, is_swapped = tokens, tokens[:0], False
        is_truncated = len(first) + len(second) > target
        if is_truncated:
            first, second = _truncate(first, second, target, rng)
        return self._sample(first, second, target, rng) | {
            "is_random": np.array(is_swapped, np.int64),
            "truncated": np.array(is_truncated, np.int64),
        }

    def _sample(
        self, first: NDArray, second: NDArray, target: int, rng: np.random.RandomState
    ) -> dict[str, NDArray]:
        special, length = self._vocabulary.special, self._plan.seq_length
        cls, sep = np.array([special["cls"]]), np.array([special["sep"]])
        rest = [second, sep] if len(second) else []
        tokens = np.concatenate([cls, first, sep, *rest])
        num_tokens = len(tokens)
        # Megatron pads the types with the padding token as well.
        text, types = np.full((2, length), special["pad"])
        text[:num_tokens] = tokens
        types[: len(first) + 2] = 0
        types[len(first) + 2 : num_tokens] = 1
        labels = np.full(length, -1)
        loss_mask, padding_mask = np.zeros((2, length), np.int64)
        padding_mask[:num_tokens] = 1
        positions, replacements = self._masks(tokens, target, rng)
        labels[positions] = tokens[positions]
        text[positions] = replacements
        loss_mask[positions] = 1
        return {
            "text": text,
            "types": types,
            "labels": labels,
            "loss_mask": loss_mask,
            "padding_mask": padding_mask,
        }

    def _masks(
        self, tokens: NDArray, target: int, rng: np.random.RandomState
    ) -> tuple[list[int], list[int]]:
        """Return the positions that are predicted, and the tokens that stand there instead."""
        random, ids, mask = (
            rng.random_sample,
            self._vocabulary.ids,
            self._vocabulary.special["mask"],
        )
        positions: list[int] = []
        replacements: list[int] = []
        for ngram in masked_ngrams(
            tokens,
            target,
            self._vocabulary,
            mask_prob=self._plan.mask_prob,
            draw_words=lambda: bisect_right(_NGRAM_CDF, random()) + 1,
            rng=rng,
        ):
            positions += ngram
            for position in ngram:
                if random() < 0.8:
                    replacements.append(mask)
                elif random() < 0.5:
                    replacements.append(int(tokens[position]))
                else:
                    replacements.append(int(ids[rng.randint(0, len(ids))]))
        return positions, replacements


def _segments(
    tokens: NDArray, sizes: NDArray, rng: np.random.RandomState
) -> tuple[NDArray, NDArray, bool]:
    """Cut sentences into two segments; return them, and whether they changed places."""
    num_sentences = len(sizes)
    num_first = rng.randint(1, num_sentences) if num_sentences > 2 else 1
    cut = int(sizes[:num_first].sum())
    first, second = tokens[:cut], tokens[cut:]
    if rng.random_sample() < 0.5:
        return second, first, True
    return first, second, False


def _truncate(
    first: NDArray, second: NDArray, target: int, rng: np.random.RandomState
) -> tuple[NDArray, NDArray]:
    """Cut two segments to `target` tokens together: the longer loses one at either end, by turns.

    Randomness: one number for each token, all drawn at once.
    """
    excess = len(first) + len(second) - target
    difference = len(first) - len(second)
    is_of_first = np.arange(excess) % 2 == 1
    ahead = min(abs(difference), excess)
    is_of_first[ahead:] = is_of_first[: excess - ahead].copy()
    is_of_first[:ahead] = difference > 0
    is_front = rng.random_sample(excess) < 0.5
    return (
        _without(first, is_front[is_of_first]),
        _without(second, is_front[~is_of_first]),
    )


def _without(tokens: NDArray, is_front: NDArray) -> NDArray:
    """Return `tokens` without one at the front or at the end for each of `is_front`."""
    num_front = int(is_front.sum())
    return tokens[num_front : len(tokens) - (len(is_front) - num_front)]


def masked_view(objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int) -> View:
    """Return the builder of masked samples from runs of sentences.

    Raises:
        DataError: the tokenizer lacks a special token.
    """
    vocabulary = MaskingVocabulary.of(tokenizer, "cls", "sep", "mask", "pad")
    return partial(BertDataset, plan=objective.own, vocabulary=vocabulary, seed=seed)
