"""Samples of packed documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.gpt_dataset import GPTDataset, build_splits
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.errors import DataError


def corpus(prefix, sizes):
    """Write documents whose tokens are 0, 1, 2 and so on over the whole corpus."""
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
    """Every sample equals a slice of the whole stream, held in memory."""
    tmp_path = tmp_path_factory.mktemp("corpus")
    source = corpus(tmp_path / "c", sizes)
    documents = range(1, len(sizes))
    dataset = GPTDataset(
        source, documents, num_samples=num_samples, seq_length=seq_length, seed=num_samples
    )
    stream = np.concatenate([source[i] for i in dataset.index.document_order])
    assert len(dataset) >= num_samples
    for i in range(len(dataset)):
        start = int(dataset.index.sample_order[i]) * seq_length
        assert dataset[i].tolist() == stream[start : start + seq_length + 1].tolist()
        assert dataset[i].dtype == np.int64


def test_every_token_but_the_tail_is_seen_once_in_an_epoch(tmp_path):
    source = corpus(tmp_path / "c", [7, 0, 4, 30, 2, 18])
    dataset = GPTDataset(source, range(6), num_samples=1, seq_length=5, seed=1)
    inputs = np.concatenate([dataset[i][:-1] for i in range(len(dataset))])
    assert len(dataset) == 12
    assert len(set(inputs.tolist())) == inputs.size == 60


def test_two_samples_share_the_token_between_them(tmp_path):
    dataset = GPTDataset(
        corpus(tmp_path / "c", [40]), range(1), num_samples=1, seq_length=5, seed=1
    )
    samples = sorted(dataset[i].tolist() for i in range(len(dataset)))
    assert samples == [list(range(k, k + 6)) for k in range(0, 35, 5)]


def test_a_corpus_shorter_than_a_sample_is_refused_with_its_tokens(tmp_path):
    source = corpus(tmp_path / "c", [4, 6])
    with pytest.raises(
        DataError, match=r"documents 0 to 2 hold 10 tokens, one sample needs 11 \(--seq-length"
    ):
        GPTDataset(source, range(2), num_samples=1, seq_length=10, seed=1)


def test_splits_use_documents_of_their_own(tmp_path):
    corpus(tmp_path / "c", [10] * 100)
    train, valid, test = build_splits(
        tmp_path / "c", split="80,15,5", num_samples=(30, 5, 2), seq_length=8, seed=1
    )
    seen = [
        {int(token) // 10 for i in range(len(part)) for token in part[i]}
        for part in (train, valid, test)
    ]
    assert seen[0] <= set(range(80))
    assert seen[1] <= set(range(80, 95))
    assert seen[2] <= set(range(95, 100))


def test_a_split_without_documents_or_wishes_is_none(tmp_path):
    corpus(tmp_path / "c", [10] * 10)
    parts = build_splits(tmp_path / "c", split="1,0,1", num_samples=(3, 5, 0), seq_length=8, seed=1)
    assert [part is None for part in parts] == [False, True, True]


def test_an_empty_corpus_is_refused(tmp_path):
    corpus(tmp_path / "c", [])
    with pytest.raises(DataError, match="has no documents: 0 tokens, one sample needs 9"):
        build_splits(tmp_path / "c", split="1", num_samples=(1, 0, 0), seq_length=8, seed=1)


def test_the_cache_goes_where_it_is_told(tmp_path):
    corpus(tmp_path / "c", [10] * 10)
    build_splits(
        tmp_path / "c",
        split="1",
        num_samples=(1, 0, 0),
        seq_length=8,
        seed=1,
        cache_directory=tmp_path / "cache",
    )
    assert len(list((tmp_path / "cache").iterdir())) == 3
    assert not (tmp_path / "c-index-cache").exists()
