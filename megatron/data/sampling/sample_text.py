"""Samples as text: documents, masked sentences, those of an encoder and a decoder."""

from collections.abc import Iterator

import numpy as np

from megatron.data.sampling.batch_sampler import Sample
from megatron.tokenizer.types.tokenizer import Tokenizer


def tokens_of(sample: Sample) -> dict[str, list[int]]:
    """Return the network inputs of a sample without padding, by the name of each part.

    The only part of a decoder's sample has the name "".
    """
    if "text_enc" in sample:
        return {
            "encoder": sample["text_enc"][: int(sample["enc_length"])].tolist(),
            "decoder": sample["text_dec"][: int(sample["dec_length"])].tolist(),
        }
    if "padding_mask" in sample:
        return {"": sample["text"][: int(sample["padding_mask"].sum())].tolist()}
    return {"": sample["tokens"].tolist()}


def texts_of(sample: Sample, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield each part of a sample as text.

    Of masked ones, each token to be predicted is followed by the predicted one in parentheses:
    `the [MASK](cat) sat` is a masked token, `the cat(cat) sat` one that stays, `the dog(cat) sat`
    one that another takes the place of.
    """
    for name, tokens in tokens_of(sample).items():
        if "padding_mask" in sample:
            text = " ".join(_with_masks(tokens, sample["labels"].tolist(), tokenizer))
        else:
            text = tokenizer.decode(tokens)
        yield f"{name}: {text}" if name else text


def _with_masks(tokens: list[int], labels: list[int], tokenizer: Tokenizer) -> Iterator[str]:
    start = 0
    for position in np.flatnonzero(np.array(labels[: len(tokens)]) >= 0).tolist():
        if position > start:
            yield tokenizer.decode(tokens[start:position])
        shown, predicted = ([tokens[position]], [labels[position]])
        yield f"{tokenizer.decode(shown)}({tokenizer.decode(predicted)})"
        start = position + 1
    if start < len(tokens):
        yield tokenizer.decode(tokens[start:])
