"""The data sets of a run, from its plan."""

import logging

import numpy as np
import pytest
from problems import problem
from tiny import tiny_plan

from megatron.common.errors import DataError
from megatron.data.datasets.datasets import build_datasets
from megatron.data.datasets.run_datasets import CorpusUse
from megatron.data.token_files.index_files import INDEX_WRITERS, IndexContent
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter

ITERS = ["--global-batch-size", "4", "--train-iters", "10", "--eval-iters", "2"]


def corpus(prefix, num_documents, first_token=0, length=10):
    """Write documents of `length` tokens, which are all the number of the document."""
    with IndexedDatasetWriter(prefix, "i4") as writer:
        for i in range(num_documents):
            writer.append(np.full(length, first_token + i))
    return str(prefix)


def write_older(prefix, num_documents):
    """Write the same documents in the format of --dataset-impl cached."""
    np.repeat(np.arange(num_documents, dtype="<i4"), 10).tofile(f"{prefix}.bin")
    content = IndexContent(
        dtype=np.dtype("<i4"),
        num_sequences=num_documents,
        num_documents=num_documents,
        sizes=lambda: iter([np.full(num_documents, 10, "<i8")]),
        document_starts=lambda: iter([np.arange(num_documents + 1)]),
    )
    with open(f"{prefix}.idx", "wb") as file:
        INDEX_WRITERS["cached"](file, content)
    return str(prefix)


def build(*flags):
    """Build what the flags say, with samples of 8 + 1 tokens."""
    plan = tiny_plan(*ITERS, *flags, without=("--data-path",)).data
    return build_datasets(plan, seq_length=8, seed=1)


def documents_in(dataset, count=None):
    return {int(token) for i in range(count or len(dataset)) for token in dataset[i]["tokens"]}


def test_parts_of_one_corpus_share_no_document(tmp_path):
    path = corpus(tmp_path / "c", 100)
    sets = build("--data-path", path, "--split", "80,15,5")
    assert documents_in(sets.train) <= set(range(80))
    assert documents_in(sets.valid["valid"]) <= set(range(80, 95))
    assert documents_in(sets.test["test"]) <= set(range(95, 100))


def test_a_set_without_documents_is_left_out_and_logged(tmp_path, caplog):
    path = corpus(tmp_path / "c", 10)
    with caplog.at_level(logging.INFO):
        sets = build("--data-path", path, "--split", "1,0,1")
    assert (list(sets.valid), list(sets.test)) == ([], ["test"])
    assert "valid set valid has no documents: it is left out" in caplog.text


@pytest.mark.parametrize("split", ["80,10,10", "80,0,20"])
def test_a_set_of_less_than_a_sample_is_left_out_as_an_empty_one_is(tmp_path, caplog, split):
    path = corpus(tmp_path / "c", 10, length=4)
    with caplog.at_level(logging.INFO):
        sets = build("--data-path", path, "--split", split)
    assert (sets.valid, sets.test) == ({}, {})
    reason = "4 tokens of the 9 of one sample" if split == "80,10,10" else "no documents"
    assert f"valid set valid has {reason}: it is left out" in caplog.text
    assert "test set test has" in caplog.text
    assert len(sets.train) >= 40


def test_a_corpus_of_less_than_a_sample_is_left_out_of_a_blend_but_not_of_training(
    tmp_path, caplog
):
    long, tiny = corpus(tmp_path / "a", 100), corpus(tmp_path / "b", 10, 1000, length=4)
    flags = ("--data-path", "1", long, "1", tiny, "--split")
    sets = build(*flags, "80,10,10")
    assert f"{tiny} has 4 tokens of the 9 of one sample for valid: it is left" in caplog.text
    assert documents_in(sets.valid["valid"]) <= set(range(80, 90))
    with problem("b: … 0 to 1 … 4 tokens … 9 … --seq-length", DataError):
        build(*flags, "10,80,10")


def test_what_is_read_of_each_corpus_is_reported(tmp_path):
    first, second = corpus(tmp_path / "a", 100), corpus(tmp_path / "b", 5, 1000)
    uses = build("--data-path", "3", first, "1", second, "--split", "1").uses
    assert list(uses) == [("train", "train")]
    assert uses["train", "train"] == [
        CorpusUse(first, 3.0, 0.75, 100, 1000, 31, 31 * 8 / 1000, int),
        CorpusUse(second, 1.0, 0.25, 5, 50, 11, 11 * 8 / 50, int),
    ]


def test_nothing_to_train_on_is_an_error(tmp_path):
    path = corpus(tmp_path / "c", 10)
    with problem("--split 0,1 … /c … training", DataError):
        build("--data-path", path, "--split", "0,1")


def test_an_empty_corpus_is_refused(tmp_path):
    path = corpus(tmp_path / "c", 0)
    with problem("c … 0 tokens … 9", DataError):
        build("--data-path", path)


def test_a_blend_takes_from_each_corpus_by_weight(tmp_path):
    first, second = corpus(tmp_path / "a", 100), corpus(tmp_path / "b", 50, 1000)
    sets = build("--data-path", "3", first, "1", second, "--split", "8,1,1")
    assert len(sets.train) == 40
    prefixes = [sets.train.origin(i).prefix for i in range(40)]
    assert (prefixes.count(first), prefixes.count(second)) == (30, 10)
    assert documents_in(sets.train) <= {*range(80), *range(1000, 1040)}
    assert documents_in(sets.valid["valid"]) <= {*range(80, 90), *range(1040, 1045)}


def test_a_corpus_without_documents_in_its_range_leaves_the_others_their_proportions(
    tmp_path, caplog
):
    long, tiny = corpus(tmp_path / "a", 100), corpus(tmp_path / "b", 3, 1000)
    other = corpus(tmp_path / "c", 100, 2000)
    sets = build("--data-path", "1", long, "5", tiny, "3", other, "--split", "90,10")
    assert f"{tiny} has no documents for valid: it is left out of the blend" in caplog.text
    valid = sets.valid["valid"]
    prefixes = [valid.origin(i).prefix for i in range(len(valid))]
    assert (prefixes.count(long), prefixes.count(other)) == (len(valid) / 4, len(valid) * 3 / 4)


def test_a_corpus_of_weight_zero_is_not_read(tmp_path):
    used, idle = corpus(tmp_path / "a", 100), corpus(tmp_path / "b", 100, 1000)
    sets = build("--data-path", "1", used, "0", idle, "--split", "1,1,1")
    assert documents_in(sets.train) <= set(range(100))


def test_weighted_paths_make_sets_by_name(tmp_path):
    first, second = corpus(tmp_path / "a", 100), corpus(tmp_path / "b", 50, 1000)
    sets = build(
        *("--train-weighted-split-paths", f"t: 1 0:0.9 {first}, 1 0:0.5 {second}"),
        *("--valid-weighted-split-paths", f"en: 1 0.9:1 {first}", f"fr: 1 0.5:0.7 {second}"),
        *("--test-weighted-split-paths", f"end: 1 0.7:1 {second}"),
    )
    assert documents_in(sets.train) <= {*range(90), *range(1000, 1025)}
    assert list(sets.valid) == ["en", "fr"]
    assert documents_in(sets.valid["en"]) <= set(range(90, 100))
    assert documents_in(sets.valid["fr"]) <= set(range(1025, 1035))
    assert documents_in(sets.test["end"]) <= set(range(1035, 1050))


def test_ranges_of_one_corpus_have_index_maps_of_their_own(tmp_path):
    path = corpus(tmp_path / "a", 100)
    sets = build(
        *("--train-weighted-split-paths", f"t: 1 0:0.5 {path}"),
        *("--valid-weighted-split-paths", f"v: 1 0.5:0.75 {path}", f"w: 1 0.75:1 {path}"),
    )
    assert documents_in(sets.valid["v"]) <= set(range(50, 75))
    assert documents_in(sets.valid["w"]) <= set(range(75, 100))


def test_the_cache_goes_to_the_folder_of_the_flag(tmp_path):
    path = corpus(tmp_path / "c", 10)
    flags = ["--data-path", path, "--split", "1", "--data-cache-path", str(tmp_path / "cache")]
    build(*flags)
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 3
    assert not (tmp_path / "c-index-cache").exists()


def test_cyclic_reads_permutations_of_the_samples_without_end(tmp_path):
    path = corpus(tmp_path / "c", 100)
    flags = ["--data-path", path, "--split", "8,1,1"]
    single, cyclic = build(*flags).train, build(*flags, "--dataloader-type", "cyclic").train
    count = len(single)
    expected = [
        int(i) for epoch in range(3) for i in np.random.RandomState([1, epoch]).permutation(count)
    ]
    found = [cyclic.origin(position).sample for position in range(3 * count)]
    assert found == expected
    assert len(set(found[:count])) == len(set(found[count : 2 * count])) == count
    # A position is a function of itself, whichever was read before.
    for position in (2 * count, 5, 2 * count + 1):
        assert np.array_equal(cyclic[position]["tokens"], single[expected[position]]["tokens"])


def test_the_older_format_gives_the_same_samples(tmp_path):
    path = corpus(tmp_path / "c", 100)
    complete = build("--data-path", path, "--split", "1").train
    older = write_older(tmp_path / "older", 100)
    for impl in ("cached", "lazy", "infer"):
        found = build("--data-path", older, "--split", "1", "--data-impl", impl).train
        for i in range(20):
            assert np.array_equal(found[i]["tokens"], complete[i]["tokens"])
        assert found.origin(3).pieces == complete.origin(3).pieces
    with problem("older.idx … --dataset-impl mmap", DataError):
        build("--data-path", older, "--data-impl", "mmap")


def test_random_tokens_are_of_no_document():
    plan = tiny_plan("--mock-data", without=("--data-path",))
    with problem("--mock-data … documents"):
        build_datasets(plan.data, seq_length=6, seed=1)
