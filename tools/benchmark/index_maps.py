"""Cost of index maps, blends and samples, beside Megatron-LM's own steps written in numpy.

Megatron-LM's C++ loop over documents is left out of its side, and so is everything but the
gathering of tokens from its samples: the ratios are lower bounds. The rule of its blends is compiled
here from a loop in C that goes one sample after the other, where there is a C compiler; without
one it is followed in Python, on a shorter blend.
"""

import ctypes
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import numpy as np

from megatron.data.blend import blend_order
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.data.sample_index import SampleIndex, build_sample_index, plan_epochs
from megatron.tool import run_tool

SEQ_LENGTH = 2048
MEAN_TOKENS = 600
BLEND_IN_C = """
#include <stdint.h>
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
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--sets", type=int, default=100, help="data sets in the blend")
    parser.add_argument("--samples", type=int, default=10_000_000, help="samples of the blend")
    parser.add_argument("--rounds", type=int, default=3, help="turns; the fastest counts")
    parser.add_argument("--corpus-tokens", type=int, default=100_000_000)
    said = parser.parse_args(argv)
    compare_maps(said)
    compare_blends(said)
    for mean in (600, 60, 20_000):
        compare_samples(mean, said.corpus_tokens)


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function` returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def cost(function: Callable[[], Any]) -> tuple[float, float]:
    """Return CPU seconds, and megabytes by which the process grew at most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_at = time.process_time()
    function()
    seconds = time.process_time() - started_at
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000


def compare_maps(said: Namespace) -> None:
    """Print the cost of the three maps, from nothing and from the cache."""
    turns = [
        [apart(maps, said.documents, said.epochs) for maps in (our_maps, their_maps)]
        for _ in range(said.rounds)
    ]
    ours, theirs = (min(side) for side in zip(*turns, strict=True))
    print(
        f"index maps, {said.documents} documents * {said.epochs} epochs: "
        f"{ours[0]:.2f} CPU-s, {ours[1]:.0f} MB more | Megatron-LM without its C++ step "
        f"{theirs[0]:.2f} CPU-s, {theirs[1]:.0f} MB | ratio of time {ours[0] / theirs[0]:.2f}, "
        f"of memory {ours[1] / theirs[1]:.2f}"
    )
    print(f"  from the cache: {1000 * apart(cached_maps, said.documents):.1f} ms")


def sizes_of(documents: int) -> np.ndarray:
    """Return lengths of documents."""
    lengths = np.random.default_rng(0).integers(1, 2 * MEAN_TOKENS, documents, dtype=np.int32)
    return lengths


def wanted(sizes: np.ndarray, epochs: int) -> int:
    """Return how many samples fill `epochs` epochs."""
    return (epochs * int(sizes.sum(dtype=np.int64)) - 1) // SEQ_LENGTH


def our_maps(documents: int, epochs: int) -> tuple[float, float]:
    """Measure the maps that training uses."""
    sizes = sizes_of(documents)
    num_tokens = int(sizes.sum(dtype=np.int64))

    def build() -> None:
        plan = plan_epochs(num_tokens, num_samples=wanted(sizes, epochs), seq_length=SEQ_LENGTH)
        build_sample_index(sizes, range(documents), plan, seq_length=SEQ_LENGTH, seed=1)

    return cost(build)


def their_maps(documents: int, epochs: int) -> tuple[float, float]:
    """Measure Megatron-LM's maps, all but the one that its C++ builds."""
    sizes = sizes_of(documents)

    def build() -> None:
        rng = np.random.RandomState(1)
        order = np.mgrid[0:epochs, 0:documents][1]
        order[:] = np.arange(documents, dtype=np.int32)
        order = order.reshape(-1).astype(np.int32)
        rng.shuffle(order)
        samples = np.arange(wanted(sizes, epochs), dtype=np.uint32)
        rng.shuffle(samples)

    return cost(build)


def cached_maps(documents: int) -> float:
    """Return the seconds that a data set takes whose maps are there."""
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "corpus"
        with IndexedDatasetWriter(prefix, "u1") as writer:
            sizes = np.full(1000, MEAN_TOKENS)
            for _ in range(documents // 1000):
                writer.append(np.zeros(sizes.sum(), np.uint8), sizes // 20 * 20)
        dataset = IndexedDataset(prefix)

        def build() -> None:
            GPTDataset(
                dataset, range(len(dataset)), num_samples=1000, seq_length=SEQ_LENGTH, seed=1
            )

        build()
        started_at = time.perf_counter()
        build()
        return time.perf_counter() - started_at


def compare_blends(said: Namespace) -> None:
    """Print the cost of a blend."""
    weights = np.random.default_rng(0).random(said.sets).tolist()
    compiler = shutil.which("cc")
    count = said.samples if compiler else min(said.samples, 100_000)
    name = "in a C loop" if compiler else "in Python, as there is no C compiler"
    with tempfile.TemporaryDirectory() as directory:
        theirs = compiled_blend(compiler, Path(directory)) if compiler else their_blend
        ours_s, theirs_s = [], []
        for _ in range(said.rounds):
            ours_s.append(cost(lambda: blend_order(weights, said.samples))[0])
            theirs_s.append(cost(lambda: theirs(weights, count))[0])
        same = (blend_order(weights, count).sources == theirs(weights, count)).all()
    ours, other = min(ours_s) / said.samples, min(theirs_s) / count
    print(
        f"blend of {said.sets} sets, {said.samples} samples: {min(ours_s):.2f} CPU-s, "
        f"{1e9 * ours:.0f} ns a sample | one after the other {name} {1e9 * other:.0f} ns | "
        f"ratio {ours / other:.3f} | same order: {same}"
    )


def compiled_blend(compiler: str, directory: Path) -> Callable[[Sequence[float], int], np.ndarray]:
    """Return the rule as it is told, in machine code."""
    source, library = directory / "blend.c", directory / "blend.so"
    source.write_text(BLEND_IN_C)
    command = [compiler, "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(command, check=True)
    blend = ctypes.CDLL(str(library)).blend

    def run(weights: Sequence[float], num_samples: int) -> np.ndarray:
        shares = shares_by_rule(weights)
        taken = np.zeros(len(shares), np.int64)
        sources, samples = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (shares, taken)]
        results = [ctypes.c_void_p(array.ctypes.data) for array in (sources, samples)]
        sets, count = ctypes.c_int64(len(shares)), ctypes.c_int64(num_samples)
        blend(pointers[0], sets, pointers[1], count, *results)
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
    """Return the order by the rule as it is told."""
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
        count = min(len(dataset), 10_000)
        index = SampleIndex(*(each[:] for each in vars(dataset.index).values()))
        ours, theirs = [], []
        for _ in range(4):
            ours.append(cost(lambda: [dataset[i] for i in range(count)])[0])
            theirs.append(cost(lambda: [their_sample(corpus, index, i) for i in range(count)])[0])
        same = all((dataset[i] == their_sample(corpus, index, i)).all() for i in range(100))
        print(
            f"dataset[i], documents of {mean} tokens: {count / min(ours):.0f} samples/s | "
            f"Megatron-LM's gathering {count / min(theirs):.0f} | "
            f"ratio {min(theirs) / min(ours):.1f} | same tokens: {same}"
        )


def their_sample(corpus: IndexedDataset, index: SampleIndex, i: int) -> np.ndarray:
    """Return sample i, one document after the other."""

    def get(document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        size = corpus.sizes[document]
        start = corpus.pointers[document] + offset * corpus.dtype.itemsize
        count = size - offset if length is None else length
        return np.frombuffer(corpus.tokens, dtype=corpus.dtype, count=count, offset=start)

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
