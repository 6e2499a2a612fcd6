"""What tests of samples of sentences share: a corpus, its tokenizer, plans and digests."""

from hashlib import sha256

import numpy as np
from sentence_corpora import thousand_documents, write_sentences, write_vocabulary
from tiny import tiny_config

from megatron.config.plan.samples import plan_samples
from megatron.data.datasets.datasets import build_datasets
from megatron.extensions.masked_lm.data import SentenceDataset
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer

SEED = 1234


def corpus_in(folder):
    """Return a thousand documents, and the file of their vocabulary."""
    dataset = write_sentences(folder / "corpus", *thousand_documents())
    return dataset, write_vocabulary(folder / "vocab.txt")


def tokenizer_of(corpus, extra_ids=0):
    return WordPieceTokenizer(corpus[1], lower_case=True, extra_ids=extra_ids)


def sentences_of(corpus, seq_length, sentences):
    return SentenceDataset(
        corpus[0],
        range(1000),
        num_samples=5000,
        seq_length=seq_length,
        seed=SEED,
        sentences=sentences,
    )


def digest(*arrays):
    content = sha256()
    for array in arrays:
        assert array.dtype == np.int64
        content.update(array.tobytes())
    return content.hexdigest()[:16]


def digest_of(dataset, keys, count=500):
    return digest(*(sample[key] for i in range(count) if (sample := dataset[i]) for key in keys))


def run(prefix, name, *flags):
    config = tiny_config("--data-path", *prefix.split(), "--seq-length", "32", *flags)
    decided = plan_samples(config, world_size=1, objective=name)
    return decided, build_datasets(decided.data, seq_length=32, seed=SEED)
