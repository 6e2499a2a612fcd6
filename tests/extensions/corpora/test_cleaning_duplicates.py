"""Near duplicates: estimates near the truth, every planted pair found, nothing else reported."""

import io
import itertools
import random
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem
from texts import english

from megatron.common.errors import DataError
from megatron.extensions.corpora.cleaning.duplicates import (
    BAND,
    ComparePairs,
    band_records,
    jaccard,
    most_differences,
    similar_pairs,
)
from megatron.extensions.corpora.cleaning.external_sort import ExternalSorter, unique_blocks
from megatron.extensions.corpora.cleaning.fingerprints import (
    Texts,
    document_ids,
    document_type,
    minhash,
    save,
    shingles,
    take_fingerprints,
)
from megatron.extensions.corpora.cleaning.groups import Groups

SEEDS = 512
letters = st.text(alphabet="abcdé \U0001f600", max_size=60)


@settings(max_examples=60)
@given(letters, letters, letters)
def test_fingerprints_estimate_the_similarity(common, one, other):
    first, second = common + one, common + other
    exact = jaccard(shingles(first), shingles(second), "union")
    sketches = [minhash(text, num_seeds=SEEDS, seed=1234) for text in (first, second)]
    estimate = (sketches[0] == sketches[1]).mean()
    # Six standard deviations of the estimate, and no less than what one number weighs.
    assert abs(estimate - exact) <= 6 * np.sqrt(exact * (1 - exact) / SEEDS) + 1 / SEEDS


@given(st.sets(st.integers()), st.sets(st.integers()))
def test_similarities_are_those_of_sets(one, other):
    kinds = {kind: jaccard(one, other, kind) for kind in ("union", "min", "max")}
    assert kinds == {kind: jaccard(other, one, kind) for kind in kinds}
    assert 0 <= kinds["union"] <= kinds["max"] <= kinds["min"] <= 1
    if one and other:
        assert kinds["union"] == len(one & other) / len(one | other)
    if one and one <= other:
        assert kinds["min"] == 1


def test_shingles_are_all_runs_of_five():
    assert shingles("abcdefg") == {"abcde", "bcdef", "cdefg"}
    assert shingles("abc") == {"abc"}
    assert shingles("") == set()


@pytest.fixture
def search(write):
    """Return a function from texts to the similar pairs among them."""

    def run(texts, *, kind="union", rounds=1, bands=20, seeds=100, workers=1, run_records=64):
        path = write("in.jsonl", [{"id": str(i), "text": text} for i, text in enumerate(texts)])
        taken = take_fingerprints([(path, "id")], [], num_seeds=seeds, seed=1, workers=workers)
        with tempfile.TemporaryFile() as runs, tempfile.TemporaryFile() as scratch:
            sorter = ExternalSorter(runs, BAND, run_records=run_records)
            for entries in taken.entries:
                sorter.add(band_records(entries, bands))
            compare = ComparePairs(taken.sources, kind)
            options = {"rounds": rounds, "workers": workers}
            found = [
                pair
                for block in similar_pairs(sorter.blocks(), compare, scratch, **options)
                for pair in block.tolist()
            ]
        with Texts(taken.sources) as names:
            return [(int(names.name(a)), int(names.name(b)), alike) for a, b, alike in found]

    return run


@pytest.mark.parametrize("workers", [1, 2])
def test_planted_pairs_are_found_and_nothing_else(search, workers):
    texts = [english(seed) for seed in range(40)]
    planted = {
        (3, 40): texts[3] + " One more sentence.",
        (10, 41): texts[10][100:],
        (5, 42): texts[5],
    }
    found = search([*texts, *planted.values()], workers=workers)
    assert [(main, other) for main, other, _ in found] == sorted(planted)
    for main, other, similarity in found:
        exact = jaccard(shingles(texts[main]), shingles(planted[main, other]), "union")
        assert similarity == exact > 0.8


def test_a_pair_must_be_more_than_half_the_same(search):
    of_both = [chr(ord("a") + i) for i in range(8)]
    half = ["".join(of_both[:7]) + "xyz", "".join(of_both[:7]) + "uvw"]  # 3 of 9 in common
    assert search([*half], bands=100) == []
    # shingles of the first are half of the second's, exactly
    assert jaccard(shingles("abcdef"), shingles("abcdefgh"), "union") == 0.5
    assert search(["abcdef", "abcdefgh"], bands=100) == []
    assert search(["abcdefg", "abcdefgh"], bands=100) == [(0, 1, 0.75)]
    assert search(["abcdef", "abcdefgh"], bands=100, kind="min") == [(0, 1, 1.0)]


def test_rounds_go_on_in_what_is_left_of_a_bucket(search):
    base, other = english(1), english(2)
    texts = [base, other, base + "x", other + "x"]
    exact = [(0, 2), (1, 3)]
    assert [pair[:2] for pair in search(texts)] == exact
    assert [pair[:2] for pair in search(texts, rounds=-1)] == exact
    # All in one bucket: one number, the least hash of what every text has.
    one_bucket = ["aaaaaaaaa" + end for end in ("bcdefghij" * 9, "klmnopqrs" * 9)]
    texts = [one_bucket[0], one_bucket[1], one_bucket[0] + "!", one_bucket[1] + "!"]
    with_bands = {rounds: search(texts, rounds=rounds, bands=1, seeds=1) for rounds in (1, -1)}
    assert set(with_bands[1]) <= set(with_bands[-1])


def test_a_chain_of_copies_is_one_group(search):
    text = english(7)
    found = search([text] * 6 + [""] * 2)
    assert [pair[:2] for pair in found] == [*((0, i) for i in range(1, 6)), (6, 7)]
    assert {similarity for _, _, similarity in found} == {1.0}


def take(path, loaded=(), seeds=20, seed=1):
    taken = take_fingerprints([path] if path else [], loaded, num_seeds=seeds, seed=seed, workers=1)
    return taken.sources, np.concatenate([*taken.entries])


def save_entries(entries, sources, npz, seeds=20):
    with tempfile.TemporaryFile() as scratch:
        scratch.write(entries.tobytes())
        save(scratch, sources, npz, num_seeds=seeds, seed=1)


def test_saved_fingerprints_are_those_of_before(write, tmp_path):
    first = write("a.jsonl", [{"id": "a", "text": english(0)}, {"id": "b", "text": english(1)}])
    second = write("b.jsonl", [{"id": "c", "text": english(0)}])
    npz = str(tmp_path / "a.npz")
    sources, saved = take((first, "id"))
    save_entries(saved, sources, npz)
    assert np.load(npz)["documents"].tobytes() == saved.tobytes()
    sources, entries = take((second, "id"), [npz])
    documents = document_ids(entries["source"], entries["offset"]).tolist()
    assert documents == sorted(documents)
    with Texts(sources) as texts:
        texts.check()
        assert [texts.name(document) for document in documents] == ["a", "b", "c"]
    minhashes = entries["minhash"]
    assert minhashes[0].tolist() == minhashes[2].tolist() != minhashes[1].tolist()


def test_fingerprints_that_do_not_fit_are_refused(write, tmp_path):
    path = write("a.jsonl", [{"id": "a", "text": "some text"}])
    npz = str(tmp_path / "a.npz")
    sources, saved = take((path, "id"))
    save_entries(saved, sources, npz)
    with problem("--seed 1 … 2", DataError):
        take(None, [npz], seed=2)
    with problem("--num-seeds 20 … 10", DataError):
        take(None, [npz], seeds=10)
    with problem("a.jsonl … twice"):
        take((path, "id"), [npz])
    write("a.jsonl", [{"id": "a", "text": "another text"}])
    with Texts(sources) as texts, problem("take them again", DataError):
        texts.check()
    with problem("in.txt … fingerprints", DataError):
        (tmp_path / "in.txt").write_text("text")
        take(None, [str(tmp_path / "in.txt")])


def test_fingerprints_hold_no_code(tmp_path):
    npz = tmp_path / "evil.npz"
    np.savez(npz, settings=np.array([{"an": "object"}], object), documents=np.zeros(1))
    with problem("not a file of", DataError):
        take(None, [str(npz)])


@pytest.mark.parametrize("rounds", [1, -1])
def test_pairs_do_not_depend_on_the_size_of_sorted_runs(search, rounds):
    texts = [english(i % 7, 4 + i % 3) for i in range(40)]  # 7 groups of near copies
    found = [search(texts, rounds=rounds, run_records=size) for size in (3, 50, 1 << 20)]
    assert found[0] == found[1] == found[2] != []


@pytest.mark.parametrize(("bands", "threshold"), [(20, 0.7), (10, 0.9)])
def test_recall_of_planted_near_duplicates(search, bands, threshold):
    """At least 95 % of the pairs just above the threshold of these bands are found."""
    rng = random.Random(1)
    letters = [[rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(600)] for _ in range(150)]
    changed = []
    for text in letters:
        copy = [*text]
        # Each replaced character changes five shingles of both texts.
        share = (1 - threshold) / (1 + threshold) / 5
        for position in rng.sample(range(600), int(600 * share)):
            copy[position] = rng.choice("0123456789")
        changed.append(copy)
    texts = ["".join(text) for text in [*letters, *changed]]
    sets = [shingles(text) for text in texts]
    pairs = {(i, 150 + i) for i in range(150)}
    planted = {(a, b) for a, b in pairs if jaccard(sets[a], sets[b], "union") > threshold}
    found = {(a, b) for a, b, _ in search(texts, bands=bands)}
    assert len(planted) > 120
    assert len(found & planted) >= 0.95 * len(planted)
    assert found <= pairs  # unrelated texts are never joined


def test_sketches_keep_similar_pairs_and_few_others():
    rng = np.random.default_rng(0)
    dtype = document_type(100)
    one, similar, other = (np.zeros(2000, dtype) for _ in range(3))
    for entries in (one, similar, other):
        entries["minhash"] = rng.integers(0, 1 << 32, (2000, 100))
    # Each number agrees with the probability of the similarity.
    for entries, similarity in ((similar, 0.7), (other, 0.2)):
        agree = rng.random((2000, 100)) < similarity
        entries["minhash"][agree] = one["minhash"][agree]
    sketches = [band_records(entries, 1)["sketch"] for entries in (one, similar, other)]
    most = most_differences(0.7, 100)
    kept = [(np.bitwise_count(sketches[0] ^ each) <= most).mean() for each in sketches[1:]]
    assert kept[0] > 0.995
    assert kept[1] < 0.08


records = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(0, 1)), max_size=60)


@given(records, st.integers(1, 20), st.integers(1, 5))
def test_external_sort_equals_a_sort_in_memory(values, run_records, block_records):
    with tempfile.TemporaryFile() as scratch:
        sizes = {"run_records": run_records, "block_records": block_records}
        sorter = ExternalSorter(scratch, BAND, **sizes)
        sorter.add(np.array(values, BAND))
        blocks = [block.tolist() for block in sorter.blocks()]
        unique = [block.tolist() for block in unique_blocks(sorter.blocks())]
    assert list(itertools.chain(*blocks)) == sorted(values)
    assert list(itertools.chain(*unique)) == sorted(set(values))


class CountingFile(io.BytesIO):
    """A file that counts the bytes of its largest write and its largest read."""

    largest_write = largest_read = 0

    def write(self, data):
        self.largest_write = max(self.largest_write, len(data))
        return super().write(data)

    def read(self, size=-1):
        data = super().read(size)
        self.largest_read = max(self.largest_read, len(data))
        return data


@pytest.mark.parametrize("num_runs", [2, 20])
def test_external_sort_holds_one_run_or_one_block_of_each(num_runs):
    rng = np.random.default_rng(0)
    scratch = CountingFile()
    sorter = ExternalSorter(scratch, BAND, run_records=200, block_records=10)
    for _ in range(num_runs):
        records = np.zeros(200, BAND)
        records["key"] = rng.integers(0, 1 << 62, 200)
        sorter.add(records)
    sizes = [len(block) for block in sorter.blocks()]
    assert sum(sizes) == 200 * num_runs
    assert max(sizes) <= 10 * num_runs
    assert scratch.largest_write == 200 * BAND.itemsize
    assert scratch.largest_read == 10 * BAND.itemsize


edges = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh")))


@given(edges)
def test_groups_are_what_is_connected(pairs):
    groups = Groups()
    for one, other in pairs:
        groups.join(one, other)
    seen = list(dict.fromkeys(itertools.chain.from_iterable(pairs)))
    reach = {name: {name} for name in seen}
    for _ in seen:
        for one, other in pairs:
            union = reach[one] | reach[other]
            for name in union:
                reach[name] = reach[name] | union
    expected = []
    for name in seen:
        group = [other for other in seen if other in reach[name]]
        if group not in expected:
            expected.append(group)
    assert list(groups) == expected
