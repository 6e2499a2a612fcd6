"""Whether the first documents of an input are the same text when decoded, however few there are."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from megatron.data.block_encoder import EncodingRules
from megatron.data.conversion import Conversion, first_documents
from megatron.data.quality import SAMPLE_ONE_IN, Tally, hash_documents
from megatron.errors import DataError

FIRST = 100  # documents that are all decoded again; of those behind, one in SAMPLE_ONE_IN
MOST_CHARS = 2_000_000  # of the first ones, so that long ones take seconds at most


def try_first_documents(
    conversion: Conversion, rules: EncodingRules, tallies: Sequence[Tally]
) -> None:
    """Count in the tally of each key what comes of decoding the first documents again.

    They are those of the inputs that can be read twice. What is chosen by its hash is left to the
    process that meets it.
    """
    encoder = conversion.make_encoder()
    num_chars = 0
    for texts in islice(first_documents(conversion), FIRST):
        num_chars += sum(map(len, texts))
        if num_chars > MOST_CHARS:
            return
        for tally, text in zip(tallies, texts, strict=True):
            text = " " * (rules.prepend_space and bool(text)) + text
            try:
                tokens, _ = encoder.encode_array([text])
            except DataError:
                continue  # a bad line, which the conversion itself reports
            if len(tokens) and not _is_chosen(tokens):
                tally.take_decoded(text, encoder.decode(tokens.tolist()))


def _is_chosen(tokens: NDArray) -> bool:
    (digest,) = hash_documents(tokens, np.array([len(tokens)], np.int64)).tolist()
    return digest % SAMPLE_ONE_IN == 0
