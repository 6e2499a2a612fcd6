"""Both sample orders, token for token against slow implementations of their published rules."""

import os
import random
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import plain_order
import pytest
from problems import problem
from tiny import tiny_plan

from megatron.common.errors import DataError
from megatron.config.data.corpora import DataPlan, DatasetPlan, SourcePlan
from megatron.data.datasets.datasets import build_datasets
from megatron.data.sampling.splits import split_ranges
from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter

ORDERS = ("bigscience", "megatron-core")
SPLITS = ("969,30,1", "949,50,1", "90,5,5", "98,2,0", "1,1,1", "8,1,1", "7,2,3", "100,0,0", "5,3,2")


@pytest.fixture(autouse=True)
def quick_files(monkeypatch):
    """Thousands of small files need not reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@dataclass
class Case:
    """Corpora and what a run reads of them."""

    prefixes: list[str]
    corpora: list[list[list[int]]]
    weights: list[float]
    is_blend: bool
    split: str  # "": each set reads a range of each corpus
    ranges: dict[str, list[tuple[float, float]]]
    num_samples: dict[str, int]
    seq_length: int
    seed: int
    surplus: float = 0.005  # of megatron-core

    def parts(self, role, program):
        """Return the part of each corpus that a data set reads."""
        found = []
        for documents, weight, (start, end) in zip(
            self.corpora, self.weights, self.ranges[role], strict=True
        ):
            size = len(documents)
            first, stop = int(round(start * size)), int(round(end * size))
            if self.split:
                k = ("train", "valid", "test").index(role)
                weights = [float(word) for word in self.split.split(",")]
                first, stop = plain_order.BOUNDS[program](weights, size)[k : k + 2]
            found.append(plain_order.Part(documents[first:stop], first, weight))
        return found

    def plan(self, program):
        """Return the plan of the run."""
        sets = {
            role: DatasetPlan(
                name=role,
                num_samples=self.num_samples[role],
                sources=tuple(
                    SourcePlan(prefix=prefix, weight=weight, start=start, end=end)
                    for prefix, weight, (start, end) in zip(
                        self.prefixes, self.weights, self.ranges[role], strict=True
                    )
                ),
                is_blend=self.is_blend,
            )
            for role in ("train", "valid", "test")
        }
        return DataPlan(
            train=sets["train"],
            valid=(sets["valid"],),
            test=(sets["test"],),
            split=self.split,
            impl="infer",
            kind="documents",
            order="single",
            sample_order=program,
            blend_surplus=self.surplus if program == "megatron-core" else 0.005,
            cache_path="",
        )


def random_case(seed, folder):
    """Return a case with documents of no and of one token, on disk."""
    draw = random.Random(seed)
    tokens = count()
    corpora, prefixes = [], []
    num_corpora = draw.choice([1, 1, 1, 2, 3, 4])
    for number in range(num_corpora):
        shape = draw.choice(["short", "even", "long"])
        most = {"short": 2, "even": 12, "long": 60}[shape]
        lengths = [draw.randint(0, most) for _ in range(draw.randint(3, 60))]
        corpora.append([[next(tokens) for _ in range(length)] for length in lengths])
        prefixes.append(str(folder / f"{seed}-{number}"))
        with IndexedDatasetWriter(prefixes[-1], "i4") as writer:
            writer.append(np.array(sum(corpora[-1], []), np.int64), lengths)
    split = draw.choice(SPLITS) if draw.random() < 0.7 else ""
    cut, end = draw.uniform(0.4, 0.8), draw.uniform(0.8, 0.95)
    ranges = {"train": (0.0, cut), "valid": (cut, end), "test": (end, 1.0)}
    return Case(
        prefixes=prefixes,
        corpora=corpora,
        weights=[draw.choice([draw.uniform(0.01, 1), float(draw.randint(1, 9))]) for _ in prefixes],
        is_blend=num_corpora > 1 or draw.random() < 0.2,
        split=split,
        ranges={role: [each] * num_corpora for role, each in ranges.items()},
        num_samples={role: draw.randint(1, 150) for role in ("train", "valid", "test")},
        seq_length=draw.choice([1, 2, 3, 5, 8, 13]),
        seed=draw.choice([1, 1234, 42, draw.randrange(2**32)]),
        surplus=draw.choice([0.005, 0.005, 0.05, 1.0]),
    )


def check(case, program):
    """Compare every data set of `case`; return the samples of those that were compared."""
    needed = case.seq_length + 1
    sets = ("train", "valid", "test")
    parts = {role: case.parts(role, program) for role in sets}
    if not all(part.num_tokens >= needed for part in parts["train"]):
        return {}
    built = build_datasets(case.plan(program), seq_length=case.seq_length, seed=case.seed)
    found = {"train": built.train, **built.valid, **built.test}
    compared = {}
    for role in sets:
        least = 1 if program == "megatron-core" else needed
        if not all(part.num_tokens >= least for part in parts[role]):
            continue  # the programs end with an error here, or never
        compared[role] = plain_order.set_samples(
            parts[role],
            is_blend=case.is_blend,
            num_samples=case.num_samples[role],
            seq_length=case.seq_length,
            seed=case.seed,
            program=program,
            surplus=case.surplus,
        )
        tokens = [found[role][i]["tokens"].tolist() for i in range(case.num_samples[role])]
        assert tokens == compared[role], (case, role)
    return compared


@pytest.mark.parametrize("block", range(4))
def test_samples_are_those_of_the_published_rules(tmp_path, block):
    num_sets = num_other = 0
    for seed in range(60 * block, 60 * block + 60):
        case = random_case(seed, tmp_path)
        first, second = (check(case, program) for program in ORDERS)
        num_sets += len(first) + len(second)
        num_other += sum(first[role] != second[role] for role in first.keys() & second.keys())
    assert num_sets > 100
    assert num_other > 10  # both orders in one index cache, and neither is read for the other


def test_corpora_of_less_than_a_sample_are_repeated_for_validation_as_in_megatron_core(tmp_path):
    """The second corpus has 7 tokens for validation, and a sample 14."""
    lengths = ([20] * 20, [7] * 20)
    prefixes = [str(tmp_path / name) for name in "ab"]
    corpora = []
    for prefix, first, sizes in zip(prefixes, (0, 1000), lengths, strict=True):
        corpora.append([[first + 50 * i + k for k in range(n)] for i, n in enumerate(sizes)])
        with IndexedDatasetWriter(prefix, "i4") as writer:
            writer.append(np.array(sum(corpora[-1], []), np.int64), sizes)
    case = Case(
        prefixes=prefixes,
        corpora=corpora,
        weights=[1.0, 2.0],
        is_blend=True,
        split="90,5,5",
        ranges={role: [(0.0, 1.0)] * 2 for role in ("train", "valid", "test")},
        num_samples={"train": 20, "valid": 12, "test": 3},
        seq_length=13,
        seed=5,
    )
    compared = check(case, "megatron-core")
    assert {*compared} == {"train", "valid", "test"}
    assert sum(sample[0] >= 1000 for sample in compared["valid"]) == 8
    assert {*check(case, "bigscience")} == {"train"}


@pytest.mark.parametrize("num_corpora", [8, 9, 20])
def test_blends_of_many_corpora_are_normalised_as_each_program_adds(tmp_path, num_corpora):
    draw = random.Random(num_corpora)
    prefixes, corpora = [], []
    for number in range(num_corpora):
        corpora.append([[1000 * number + token] * 3 for token in range(9)])
        prefixes.append(str(tmp_path / str(number)))
        with IndexedDatasetWriter(prefixes[-1], "i4") as writer:
            writer.append(np.array(sum(corpora[-1], []), np.int64), [3] * 9)
    complete = [(0.0, 1.0)] * num_corpora
    for seed in range(2):
        case = Case(
            prefixes=prefixes,
            corpora=corpora,
            weights=[draw.random() for _ in prefixes],
            is_blend=True,
            split="",
            ranges={"train": complete, "valid": complete, "test": complete},
            num_samples={"train": 300, "valid": 40, "test": 1},
            seq_length=4,
            seed=seed,
        )
        assert all(check(case, program) for program in ORDERS)


@pytest.mark.parametrize("program", ORDERS)
def test_splits_are_those_of_the_published_rules(program):
    others = 0
    for split in SPLITS:
        weights = [float(word) for word in split.split(",")]
        for size in [*range(1, 1500), 364_868_892, 8_013_769]:
            bounds = plain_order.BOUNDS[program](weights, size)
            found = split_ranges(split, size, program)
            assert [each.stop for each in found] == [max(bound, 0) for bound in bounds[1:]]
            others += bounds != plain_order.BOUNDS["bigscience"](weights, size)
    assert bool(others) == (program == "megatron-core")


def test_the_flag_reaches_the_samples(tmp_path):
    """Documents 46 and 47 of 49 are for validation by one rule, and for training by the other."""
    with IndexedDatasetWriter(tmp_path / "c", "i4") as writer:
        for i in range(49):
            writer.append(np.full(10, i))
    words = ("--data-path", str(tmp_path / "c"), "--eval-iters", "2")
    seen = {}
    for flags in ((), ("--sample-order", "bigscience"), ("--sample-order", "megatron-core")):
        plan = tiny_plan(*words, *flags, without=("--data-path",)).data
        plan = replace(plan, train=replace(plan.train, num_samples=1))
        train = build_datasets(plan, seq_length=6, seed=1).train
        seen[flags] = {int(token) for i in range(len(train)) for token in train[i]["tokens"]}
    default, bigscience, core = seen.values()
    assert default == bigscience == set(range(48))
    assert core == set(range(47))


def test_an_unknown_order_is_refused():
    with problem("--sample-order … 'megatron' … choose from"):
        tiny_plan("--sample-order", "megatron")


def test_training_without_a_sample_is_refused_in_both_orders(tmp_path):
    with IndexedDatasetWriter(tmp_path / "c", "i4") as writer:
        writer.append(np.arange(5))
    for order in ORDERS:
        flags = ("--data-path", str(tmp_path / "c"), "--split", "1", "--sample-order", order)
        plan = tiny_plan(*flags, without=("--data-path",)).data
        with problem("c: … 5 tokens … 7 … --seq-length", DataError):
            build_datasets(plan, seq_length=6, seed=1)
