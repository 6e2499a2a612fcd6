"""Whether the first documents of an input are the same text when decoded, however few there are."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

import numpy as np

from megatron.common.errors import DataError
from megatron.data.preprocessing.block_encoder import Encoder, EncodingRules
from megatron.data.preprocessing.preprocess_spec import Conversion, first_documents
from megatron.data.preprocessing.quality import MOST_CHARS, SAMPLE_ONE_IN, Tally, hash_documents

FIRST = 100  # documents that are all decoded again; of those behind, one in SAMPLE_ONE_IN


def try_first_documents(
    conversion: Conversion, rules: EncodingRules, tallies: Sequence[Tally]
) -> None:
    """Count in the tally of each key what comes of decoding the first documents again.

    They are those of the inputs that can be read twice. What is chosen by its hash is left to the
    process that meets it.
    """
    documents, num_chars = [], 0
    for texts in islice(first_documents(conversion), FIRST):
        num_chars += sum(map(len, texts))
        if num_chars > MOST_CHARS:
            break
        documents.append(texts)
    encoder = conversion.make_encoder()
    for tally, texts in zip(tallies, zip(*documents, strict=True), strict=False):
        if rules.prepend_space:
            texts = tuple(" " + text if text else "" for text in texts)
        try:
            _try(encoder, rules, texts, tally)
        except DataError:  # of a bad line, which the conversion itself reports
            for text in texts:
                with suppress(DataError):
                    _try(encoder, rules, [text], tally)


def _try(encoder: Encoder, rules: EncodingRules, texts: Sequence[str], tally: Tally) -> None:
    tokens, lengths = rules.encode(encoder, texts)
    ends = np.cumsum(lengths)
    num_ends = int(rules.end is not None)
    hashes = hash_documents(tokens.astype(rules.dtype), ends)
    is_left = (lengths > num_ends) & (hashes % SAMPLE_ONE_IN != 0)
    for i in np.flatnonzero(is_left).tolist():
        ids = tokens[ends[i] - lengths[i] : ends[i] - num_ends]
        tally.take_decoded(texts[i], encoder.gives_back(ids, texts[i]))
