"""Groups of similar documents by passes over sorted files: what a union-find in memory finds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.extensions.corpora.cleaning import external_sort
from megatron.extensions.corpora.cleaning.groups import Groups
from megatron.extensions.corpora.corpus.deduplication import BY_OTHER, first_documents


def expected(pairs):
    """Return each document of a group but the first, and the first, by a union-find."""
    groups = Groups()
    for other, main in pairs:
        groups.join(str(main), str(other))
    found = [sorted(map(int, group)) for group in groups]
    return sorted((other, group[0]) for group in found for other in group[1:])


def found(pairs, folder, **sizes):
    records = np.array(pairs, BY_OTHER)
    blocks = np.array_split(records, 3)
    links = [block.copy() for block in first_documents(blocks, folder, **sizes)]
    return np.concatenate([np.zeros(0, BY_OTHER), *links]).tolist()


numbers = st.integers(0, 15)
pairs = st.lists(st.tuples(numbers, numbers).filter(lambda pair: pair[0] > pair[1]), max_size=25)


@given(pairs, st.integers(1, 9), st.integers(1, 4))
def test_groups_are_those_of_a_union_find(tmp_path_factory, pairs, run_records, block_records):
    folder = tmp_path_factory.getbasetemp()
    sizes = {"run_records": run_records, "block_records": block_records}
    assert found(pairs, folder, **sizes) == expected(pairs)


@pytest.mark.parametrize("shape", ["chain", "shuffled chain", "random", "star"])
def test_memory_is_one_run_or_one_block_of_each(shape, tmp_path, monkeypatch):
    """The largest array that is sorted, the largest read, and the number of passes."""
    rng, count = np.random.default_rng(0), 1000
    names = rng.permutation(count) if shape == "shuffled chain" else np.arange(count)
    ends = names[:-1], names[1:]
    if shape == "random":
        ends = rng.integers(0, count, (2, count))
        ends = ends[:, ends[0] != ends[1]]
    elif shape == "star":
        ends = np.zeros(count - 1, int), names[1:]
    pairs = list(zip(np.maximum(*ends).tolist(), np.minimum(*ends).tolist(), strict=True))
    sort, read = external_sort.sort_records, external_sort.SortedRun.read
    sizes, merges = [], []

    def counting_sort(records):
        sizes.append(len(records))
        return sort(records)

    def counting_read(run, wanted):
        merges.append(run.start == 0)
        sizes.append(len(records := read(run, wanted)))
        return records

    monkeypatch.setattr(external_sort, "sort_records", counting_sort)
    monkeypatch.setattr(external_sort.SortedRun, "read", counting_read)
    assert found(pairs, tmp_path, run_records=128, block_records=8) == expected(pairs)
    most_runs = -(-2 * count // 128)
    assert max(sizes) <= max(128, 8 * most_runs)
    assert sum(merges) <= 2 * np.log2(count) + 5
