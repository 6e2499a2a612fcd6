"""Samples of T5: span corruption, where sentinels stand for spans that the decoder restores."""

import logging
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
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

log = logging.getLogger(__name__)

_LONGEST = 10  # words of a span
_STOP_PROB = 0.2  # of the geometric distribution of their number


class T5Dataset(MaskedDataset):
    """Span corruption of samples of a SentenceDataset.

    The encoder reads the text with <extra_id_0>, <extra_id_1> and so on in place of spans; the
    decoder reads [BOS] and, for each span, its sentinel and its tokens, and predicts the same
    without [BOS] and with [EOS]. Spans for which there is no sentinel, or no room in the decoder,
    stay in the text.

    Shapes: dataset[i] -> {"text_enc": [seq_length], "text_dec", "labels", "loss_mask":
        [decoder_seq_length], "truncated", "enc_length", "dec_length": []} int64; the lengths count
        tokens before the padding; labels are -1 after them.
    Source: Megatron-LM, whose samples these are; arXiv:1910.10683 for the objective.
    """

    _has_warned = False

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        sample = self.dataset[i]
        target = int(sample["target_length"])
        tokens = sample["tokens"][:target]
        rng = seed_for_sample(self._rng, self._seed, int(sample["index"]))
        spans = sorted(
            masked_ngrams(
                tokens,
                target,
                self._vocabulary,
                mask_prob=self._plan.mask_prob,
                draw_words=lambda: min(int(rng.geometric(_STOP_PROB)), _LONGEST),
                rng=rng,
            )
        )
        return self._sample(tokens, self._fitting(spans, i)) | {
            "truncated": np.array(len(sample["tokens"]) > target, np.int64)
        }

    def _fitting(self, spans: list[list[int]], i: int) -> list[list[int]]:
        """Return the first spans, as many as have a sentinel and fit into the decoder."""
        ends = np.cumsum([1 + len(span) for span in spans])
        room = int(np.searchsorted(ends, self._plan.decoder_seq_length - 1, side="right"))
        count = min(room, len(self._vocabulary.sentinels))
        if count < len(spans) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "sample %d has %d spans: %d fit into --decoder-seq-length %d and have one of the %d "
                "sentinels (--vocab-extra-ids); the others stay in the text, and so in later samples",
                *(i, len(spans), count, self._plan.decoder_seq_length),
                len(self._vocabulary.sentinels),
            )
        return spans[:count]

    def _sample(self, tokens: NDArray, spans: list[list[int]]) -> dict[str, NDArray]:
        special = self._vocabulary.special
        encoder: list[NDArray] = []
        decoder: list[NDArray] = [np.array([special["bos"]])]
        start = 0
        for sentinel, span in zip(self._vocabulary.sentinels, spans, strict=False):
            mark = np.array([sentinel])
            encoder += [tokens[start : span[0]], mark]
            decoder += [mark, tokens[span]]
            start = span[-1] + 1
        source = np.concatenate([*encoder, tokens[start:]])
        target = np.concatenate([*decoder, [special["eos"]]])
        length, num_source, num_target = self._plan.decoder_seq_length, len(source), len(target) - 1
        text_enc = np.full(self._plan.seq_length, special["pad"])
        text_enc[:num_source] = source
        text_dec, labels = np.full(length, special["pad"]), np.full(length, -1)
        text_dec[:num_target], labels[:num_target] = target[:-1], target[1:]
        loss_mask = np.zeros(length, np.int64)
        loss_mask[:num_target] = 1
        return {
            "text_enc": text_enc,
            "text_dec": text_dec,
            "labels": labels,
            "loss_mask": loss_mask,
            "enc_length": np.array(num_source, np.int64),
            "dec_length": np.array(num_target, np.int64),
        }


def t5_vocabulary(tokenizer: Tokenizer) -> MaskingVocabulary:
    """Return the sentinels and special tokens that T5 needs.

    Raises:
        DataError: the tokenizer lacks some.
    """
    # Hugging Face's T5 tokenizers have no bos, its BERT tokenizers neither bos nor eos.
    vocabulary = MaskingVocabulary.of(tokenizer, "pad", ("bos", "cls", "pad"), ("eos", "sep"))
    if not vocabulary.sentinels:
        raise DataError(
            f"the tokenizer {tokenizer.name} has no sentinels <extra_id_0>, <extra_id_1> and so on, "
            "which stand for spans in T5's samples: add --vocab-extra-ids 100"
        )
    return vocabulary


def span_view(objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int) -> View:
    """Return the builder of encoder and decoder samples from runs of sentences.

    Raises:
        DataError: the tokenizer lacks a special token.
    """
    vocabulary = t5_vocabulary(tokenizer)
    return partial(T5Dataset, plan=objective.own, vocabulary=vocabulary, seed=seed)
