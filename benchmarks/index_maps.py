#!/usr/bin/env python
"""Cost of index maps, blends and samples, beside Megatron-LM's own steps written in numpy.

Its loop over documents, which cuts them into samples, and the rule of its blends, one sample after
the other, are compiled here from loops in C, where there is a C compiler. Without one the loop over
documents is left out of its side, and the rule is followed in Python, on a shorter blend. Its
samples are gathered document by document and become tensors of tokens, targets and weights, one by
one; ours are the tokens, since targets and weights are made for a whole batch.
"""

import ctypes
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import numpy as np
import torch
from xxhash import xxh3_64_hexdigest

from megatron.common.cli import ToolParser, run_tool
from megatron.data.datasets.gpt_dataset import GPTDataset
from megatron.data.sampling.blending import blend_order
from megatron.data.sampling.sample_index import SampleIndex, build_sample_index, plan_epochs
from megatron.data.token_files.indexed_dataset import IndexedDataset, IndexedDatasetWriter

SEQ_LENGTH = 2048
MEAN_TOKENS = 600
LOOPS_IN_C = """
#include <stdint.h>
void starts(const int32_t *sizes, const int32_t *order, int64_t seq_length, int64_t num_samples,
            int32_t *places) {
    int64_t document = 0, token = 0;
    for (int64_t i = 0; i <= num_samples; ++i) {
        places[2 * i] = (int32_t)document;
        places[2 * i + 1] = (int32_t)token;
        if (i == num_samples) break;
        int64_t wanted = seq_length;
        while (wanted >= sizes[order[document]] - token) {
            wanted -= sizes[order[document++]] - token;
            token = 0;
        }
        token += wanted;
    }
}
void blend(const double *shares, int64_t sets, int64_t *taken, int64_t num_samples,
           int16_t *sources, int64_t *samples) {
    for (int64_t i = 0; i < num_samples; ++i) {
        double position = i > 1 ? (double)i : 1.0, most = 0;
        int64_t best = -1;
        for (int64_t d = 0; d < sets; ++d) {
            double behind = shares[d] * position - (double)taken[d];
            if (best < 0 || behind > most) {
                most = behind;
                best = d;
            }
        }
        sources[i] = (int16_t)best;
        samples[i] = taken[best]++;
    }
}
"""


def main(argv: Sequence[str]) -> None:
    """Measure, and print one line each."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--sets", type=int, default=100, help="data sets in the blend")
    parser.add_argument("--samples", type=int, default=10_000_000, help="samples of the blend")
    parser.add_argument("--rounds", type=int, default=3, help="turns; the fastest counts")
    parser.add_argument("--corpus-tokens", type=int, default=100_000_000)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        library = compiled(Path(directory))
        compare_maps(args, library)
        compare_blends(args, library)
    for mean in (600, 60, 20_000):
        compare_samples(mean, args.corpus_tokens)


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `function` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def cost(function: Callable[[], Any]) -> tuple[float, float]:
    """Return CPU seconds, and megabytes by which the process grew at most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_at = time.process_time()
    function()
    seconds = time.process_time() - started_at
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000


def compiled(directory: Path) -> Path | None:
    """Return the library of the loops in C; None where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source, library = directory / "loops.c", directory / "loops.so"
    source.write_text(LOOPS_IN_C)
    command = [compiler, "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(command, check=True)
    return library


def pointers(*arrays: np.ndarray) -> list[ctypes.c_void_p]:
    """Return ctypes pointers to the data of the arrays."""
    return [ctypes.c_void_p(array.ctypes.data) for array in arrays]


def compare_maps(args: Namespace, library: Path | None) -> None:
    """Print the cost of the three maps, from nothing and from the cache."""
    turns = [
        [
            apart(our_maps, args.documents, args.epochs),
            apart(their_maps, args.documents, args.epochs, library),
        ]
        for _ in range(args.rounds)
    ]
    ours, theirs = (min(side) for side in zip(*turns, strict=True))
    same = ours[2].startswith(theirs[2])  # theirs lack one without a compiler
    print(
        f"index maps, {args.documents} documents * {args.epochs} epochs: {ours[0]:.2f} CPU-s, "
        f"{ours[1]:.0f} MB more | Megatron-LM{'' if library else ' without its loop over documents'} "
        f"{theirs[0]:.2f} CPU-s, {theirs[1]:.0f} MB | ratio of time {ours[0] / theirs[0]:.2f}, "
        f"of memory {ours[1] / theirs[1]:.2f} | same maps: {same}"
    )
    print(f"  from the cache: {1000 * apart(cached_maps, args.documents):.1f} ms")


def sizes_of(documents: int) -> np.ndarray:
    """Return lengths of documents."""
    lengths = np.random.default_rng(0).integers(1, 2 * MEAN_TOKENS, documents, dtype=np.int32)
    return lengths


def wanted(sizes: np.ndarray, epochs: int) -> int:
    """Return the number of samples in `epochs` epochs."""
    return (epochs * int(sizes.sum(dtype=np.int64)) - 1) // SEQ_LENGTH


def our_maps(documents: int, epochs: int) -> tuple[float, float, str]:
    """Measure the maps that training uses."""
    sizes = sizes_of(documents)
    num_tokens = int(sizes.sum(dtype=np.int64))
    found: list[np.ndarray] = []

    def build() -> None:
        plan = plan_epochs(num_tokens, num_samples=wanted(sizes, epochs), seq_length=SEQ_LENGTH)
        index = build_sample_index(sizes, range(documents), plan, seq_length=SEQ_LENGTH, seed=1)
        found.extend([index.document_order, index.sample_order, index.sample_starts])

    return *cost(build), digest(found)


def their_maps(documents: int, epochs: int, library: Path | None) -> tuple[float, float, str]:
    """Measure Megatron-LM's maps."""
    sizes, count = sizes_of(documents), wanted(sizes_of(documents), epochs)
    found: list[np.ndarray] = []

    def build() -> None:
        rng = np.random.RandomState(1)
        order = np.mgrid[0:epochs, 0:documents][1]
        order[:] = np.arange(documents, dtype=np.int32)
        order = order.reshape(-1).astype(np.int32)
        rng.shuffle(order)
        samples = np.arange(count, dtype=np.uint32)
        rng.shuffle(samples)
        found.extend([order, samples])
        if library:
            found.append(np.empty((count + 1, 2), np.int32))
            numbers = ctypes.c_int64(SEQ_LENGTH), ctypes.c_int64(count)
            loops = ctypes.CDLL(str(library))
            loops.starts(*pointers(sizes, order), *numbers, *pointers(found[-1]))

    return *cost(build), digest(found)


def digest(maps: Sequence[np.ndarray]) -> str:
    """Return a hash of the maps."""
    return " ".join(xxh3_64_hexdigest(each.data) for each in maps)


def cached_maps(documents: int) -> float:
    """Return the seconds that a data set takes whose maps are there."""
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "corpus"
        with IndexedDatasetWriter(prefix, "u1") as writer:
            sizes = np.full(1000, MEAN_TOKENS)
            for _ in range(documents // 1000):
                writer.append(np.zeros(sizes.sum(), np.uint8), sizes // 20 * 20)

        def build() -> None:
            dataset = IndexedDataset(prefix)
            GPTDataset(
                dataset, range(len(dataset)), num_samples=1000, seq_length=SEQ_LENGTH, seed=1
            )

        build()
        started_at = time.perf_counter()
        build()
        return time.perf_counter() - started_at


def compare_blends(args: Namespace, library: Path | None) -> None:
    """Print the cost of a blend."""
    weights = np.random.default_rng(0).random(args.sets).tolist()
    count = args.samples if library else min(args.samples, 100_000)
    name = "in a C loop" if library else "in Python, as there is no C compiler"
    theirs = compiled_blend(library) if library else their_blend
    ours_s, theirs_s = [], []
    for _ in range(args.rounds):
        ours_s.append(cost(lambda: blend_order(weights, args.samples))[0])
        theirs_s.append(cost(lambda: theirs(weights, count))[0])
    same = (blend_order(weights, count).sources == theirs(weights, count)).all()
    ours, other = min(ours_s) / args.samples, min(theirs_s) / count
    print(
        f"blend of {args.sets} sets, {args.samples} samples: {min(ours_s):.2f} CPU-s, "
        f"{1e9 * ours:.0f} ns a sample | one after the other {name} {1e9 * other:.0f} ns | "
        f"ratio {ours / other:.3f} | same order: {same}"
    )


def compiled_blend(library: Path) -> Callable[[Sequence[float], int], np.ndarray]:
    """Return the blending rule as published, in machine code."""
    blend = ctypes.CDLL(str(library)).blend

    def run(weights: Sequence[float], num_samples: int) -> np.ndarray:
        shares = shares_by_rule(weights)
        taken = np.zeros(len(shares), np.int64)
        sources, samples = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
        sets, count = ctypes.c_int64(len(shares)), ctypes.c_int64(num_samples)
        (places,) = pointers(shares)
        blend(places, sets, *pointers(taken), count, *pointers(sources, samples))
        return sources

    return run


def shares_by_rule(weights: Sequence[float]) -> np.ndarray:
    """Return the weights, normalised twice as Megatron-LM does."""
    total = 0.0
    for weight in weights:
        total += weight
    shares = np.array([weight / total for weight in weights])
    return shares / np.sum(shares)


def their_blend(weights: Sequence[float], num_samples: int) -> np.ndarray:
    """Return the order by the blending rule as published."""
    shares = shares_by_rule(weights)
    taken, order = np.zeros(len(shares)), np.empty(num_samples, np.int16)
    for i in range(num_samples):
        order[i] = source = np.argmax(shares * max(i, 1) - taken)
        taken[source] += 1
    return order


def compare_samples(mean: int, corpus_tokens: int) -> None:
    """Print samples a second from a corpus of documents of `mean` tokens."""
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "corpus"
        random = np.random.default_rng(0)
        sizes = random.integers(1, 2 * mean, corpus_tokens // mean)
        with IndexedDatasetWriter(prefix, "u2") as writer:
            for part in np.array_split(sizes, 100):
                writer.append(random.integers(0, 50_000, part.sum(), dtype=np.uint16), part)
        corpus = IndexedDataset(prefix)
        dataset = GPTDataset(
            corpus, range(len(corpus)), num_samples=1, seq_length=SEQ_LENGTH, seed=1
        )
        mapped = np.asarray(np.memmap(corpus.bin_path, corpus.dtype, "r"))
        count = min(len(dataset), 10_000)
        index = SampleIndex(*(each[:] for each in vars(dataset.index).values()))
        ours, theirs, gathered = [], [], []
        for _ in range(4):
            ours.append(cost(lambda: [dataset[i] for i in range(count)])[0])
            theirs.append(
                cost(lambda: [tensors_of(corpus, mapped, index, i) for i in range(count)])[0]
            )
            gathered.append(
                cost(lambda: [their_sample(corpus, mapped, index, i) for i in range(count)])[0]
            )
        same = all(
            (dataset[i]["tokens"] == their_sample(corpus, mapped, index, i)).all()
            for i in range(100)
        )
        print(
            f"dataset[i], documents of {mean} tokens: {count / min(ours):.0f} samples/s | "
            f"Megatron-LM's {count / min(theirs):.0f}, of which gathering alone "
            f"{count / min(gathered):.0f} | ratio {min(theirs) / min(ours):.1f} and "
            f"{min(gathered) / min(ours):.1f} | same tokens: {same}"
        )


def tensors_of(
    corpus: IndexedDataset, mapped: np.ndarray, index: SampleIndex, i: int
) -> tuple[torch.Tensor, ...]:
    """Return tokens, targets and weights of sample i, where padding, -1, weighs nothing."""
    text = torch.from_numpy(their_sample(corpus, mapped, index, i)).long()
    tokens, targets = text[:-1].contiguous(), text[1:].contiguous()
    weights = torch.ones(len(targets))
    weights[targets == -1] = 0.0
    tokens[tokens == -1] = 0
    targets[targets == -1] = 0
    return tokens, targets, weights


def their_sample(
    corpus: IndexedDataset, mapped: np.ndarray, index: SampleIndex, i: int
) -> np.ndarray:
    """Return sample i, one document after the other, from tokens that are mapped."""

    def get(document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        size = corpus.sizes[document]
        start = corpus.pointers[document] + offset * corpus.dtype.itemsize
        count = size - offset if length is None else length
        return np.frombuffer(mapped, dtype=corpus.dtype, count=count, offset=start)

    j = index.sample_order[i]
    first, offset = index.sample_starts[j]
    last, end = index.sample_starts[j + 1]
    order = index.document_order
    if first == last:
        return get(order[first], offset, end - offset + 1).astype(np.int64)
    parts = [get(order[first], offset)]
    parts += [get(order[k]) for k in range(first + 1, last)]
    parts.append(get(order[last], length=end + 1))
    return np.concatenate(parts).astype(np.int64)


if __name__ == "__main__":
    run_tool(main)
