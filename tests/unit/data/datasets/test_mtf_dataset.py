"""Inputs and targets: what a sample holds, which pairs it may hold, and what is refused."""

import numpy as np
import pytest
from problems import problem
from tiny import tiny_config

from megatron.common.errors import DataError
from megatron.config.plan.samples import plan_samples
from megatron.data.datasets.datasets import build_datasets
from megatron.data.datasets.packed_dataset import MTFDataset
from megatron.data.token_files.indexed_dataset import IndexedDataset, IndexedDatasetWriter

EOD = 9


def write(prefix, texts):
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for text in texts:
            writer.append(text)


def write_pairs(prefix, inputs, targets):
    write(f"{prefix}_inputs_document", inputs)
    write(f"{prefix}_targets_document", targets)


def opened(prefix):
    return [IndexedDataset(f"{prefix}_{part}_document") for part in ("inputs", "targets")]


@pytest.fixture
def prefix(tmp_path):
    """Pair k: k % 3 + 1 times 10 + k, then k % 2 + 1 times 100 + k and an end."""
    write_pairs(
        tmp_path / "tasks",
        [[10 + k] * (k % 3 + 1) for k in range(40)],
        [[100 + k] * (k % 2 + 1) + [EOD] for k in range(40)],
    )
    return str(tmp_path / "tasks")


def test_a_sample_is_uncut_pairs_and_padding(prefix):
    dataset = MTFDataset(*opened(prefix), range(40), num_samples=30, seq_length=15, seed=3)
    assert len(dataset) >= 30
    for i in range(len(dataset)):
        tokens, numbers, targets_start = dataset[i].values()
        assert tokens.shape == (16,)
        position = 0
        for number, piece in enumerate(dataset.origin(i).pieces, start=1):
            k = piece.document
            text = [10 + k] * (k % 3 + 1) + [100 + k] * (k % 2 + 1) + [EOD]
            here = slice(position, position + len(text))
            assert tokens[here].tolist() == text
            assert numbers[here].tolist() == [number] * len(text)
            assert targets_start[here].tolist() == [position + k % 3 + 1] * len(text)
            assert (piece.start, piece.stop) == (0, len(text))
            position += len(text)
        assert not any(row[position:].any() for row in dataset[i].values())
        assert position > 16 - 7, "the next pair, of at most 6 tokens, did not fit"


def test_the_packing_is_kept_and_depends_on_length_seed_and_range(prefix, tmp_path):
    def rows(**changes):
        options = {"num_samples": 20, "seq_length": 15, "seed": 3} | changes
        pairs = options.pop("pairs", range(40))
        dataset = MTFDataset(*opened(prefix), pairs, cache_directory=tmp_path / "cache", **options)
        return [[row.tolist() for row in dataset[i].values()] for i in range(20)]

    first, files = rows(), len([*(tmp_path / "cache").glob("*.npy")])
    assert (rows(), len([*(tmp_path / "cache").glob("*.npy")])) == (first, files)
    for change in ({"seq_length": 20}, {"seed": 4}, {"pairs": range(1, 40)}):
        assert rows(**change) != first


def test_inputs_without_their_targets_are_refused(tmp_path):
    write_pairs(tmp_path / "odd", [[1], [2]], [[3]])
    with problem("odd_inputs_document … 2 … odd_targets_document … 1", DataError):
        MTFDataset(*opened(tmp_path / "odd"), range(2), num_samples=1, seq_length=4, seed=1)


def test_pairs_that_are_too_long_are_left_out_and_logged(tmp_path, caplog):
    write_pairs(tmp_path / "long", [[1] * 9, [2]], [[3], [4]])
    options = {"num_samples": 2, "seq_length": 4, "seed": 1}
    dataset = MTFDataset(*opened(tmp_path / "long"), range(2), **options)
    assert {piece.document for i in range(2) for piece in dataset.origin(i).pieces} == {1}
    assert "1 of 2 pairs are left out: they are longer than a sample of 5 tokens" in caplog.text
    with problem("long_inputs_document … 0 to 1 … 5 tokens … --seq-length", DataError):
        MTFDataset(*opened(tmp_path / "long"), range(1), **options)


def test_a_blend_of_pairs_is_cut_into_disjoint_sets(prefix, tmp_path):
    write_pairs(tmp_path / "more", [[50]] * 10, [[60, EOD]] * 10)
    config = tiny_config(
        *("--data-path", "0.5", prefix, "0.5", str(tmp_path / "more")),
        *("--split", "60,40", "--eval-iters", "2", "--seq-length", "15"),
    )
    decided = plan_samples(config, world_size=1, objective="multitask")
    assert decided.data.prefixes[:2] == [
        str(tmp_path / f"more_{part}_document") for part in ("inputs", "targets")
    ]
    sets = build_datasets(decided.data, seq_length=15, seed=1)
    seen = {
        name: {
            (origin.prefix, piece.document)
            for i in range(len(dataset))
            for origin in [dataset.origin(i)]
            for piece in origin.pieces
        }
        for name, dataset in (("train", sets.train), ("valid", sets.valid["valid"]))
    }
    assert not seen["train"] & seen["valid"]
    assert {prefix for prefix, _ in seen["train"]} == set(decided.data.prefixes[::2])
