"""Samples of packed documents."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem

from megatron.common.errors import DataError
from megatron.data.datasets.gpt_dataset import GPTDataset
from megatron.data.token_files.indexed_dataset import IndexedDataset, IndexedDatasetWriter


def corpus(prefix, sizes):
    """Write documents whose tokens are 0, 1, 2 and so on over the full corpus."""
    with IndexedDatasetWriter(prefix, "i4") as writer:
        writer.append(np.arange(sum(sizes)), sizes)
    return IndexedDataset(prefix)


@given(
    sizes=st.lists(st.integers(0, 30), min_size=3, max_size=20).filter(lambda s: sum(s[1:]) > 12),
    seq_length=st.integers(1, 12),
    num_samples=st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_samples_are_cut_from_the_documents_laid_end_to_end(
    tmp_path_factory, sizes, seq_length, num_samples
):
    """Every sample equals a slice of the full stream, held in memory."""
    tmp_path = tmp_path_factory.mktemp("corpus")
    source = corpus(tmp_path / "c", sizes)
    documents = range(1, len(sizes))
    dataset = GPTDataset(
        source, documents, num_samples=num_samples, seq_length=seq_length, seed=num_samples
    )
    stream = np.concatenate([source[i] for i in dataset.index.document_order[:]])
    assert len(dataset) >= num_samples
    for i in range(len(dataset)):
        start = int(dataset.index.sample_order[i]) * seq_length
        assert dataset[i]["tokens"].tolist() == stream[start : start + seq_length + 1].tolist()
        assert dataset[i]["tokens"].dtype == np.int64


def test_every_token_but_the_tail_is_seen_once_in_an_epoch(tmp_path):
    source = corpus(tmp_path / "c", [7, 0, 4, 30, 2, 18])
    dataset = GPTDataset(source, range(6), num_samples=1, seq_length=5, seed=1)
    inputs = np.concatenate([dataset[i]["tokens"][:-1] for i in range(len(dataset))])
    assert len(dataset) == 12
    assert len(set(inputs.tolist())) == inputs.size == 60


def test_two_samples_share_the_token_between_them(tmp_path):
    dataset = GPTDataset(
        corpus(tmp_path / "c", [40]), range(1), num_samples=1, seq_length=5, seed=1
    )
    samples = sorted(dataset[i]["tokens"].tolist() for i in range(len(dataset)))
    assert samples == [list(range(k, k + 6)) for k in range(0, 35, 5)]


def test_a_corpus_shorter_than_a_sample_is_refused_with_its_tokens(tmp_path):
    source = corpus(tmp_path / "c", [4, 6])
    with problem("c: … 0 to 2 … 10 tokens … 11 … --seq-length", DataError):
        GPTDataset(source, range(2), num_samples=1, seq_length=10, seed=1)


def test_the_origin_of_a_sample_is_where_its_tokens_are(tmp_path):
    source = corpus(tmp_path / "c", [7, 0, 4, 30, 2, 18])
    dataset = GPTDataset(source, range(1, 6), num_samples=20, seq_length=5, seed=1)
    for i in range(len(dataset)):
        origin = dataset.origin(i)
        tokens = [source[piece.document][piece.start : piece.stop] for piece in origin.pieces]
        assert np.concatenate(tokens).tolist() == dataset[i]["tokens"].tolist()
        assert (origin.prefix, origin.sample) == (str(tmp_path / "c"), i)
        assert all(piece.start < piece.stop for piece in origin.pieces)
