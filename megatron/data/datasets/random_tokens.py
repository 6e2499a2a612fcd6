"""Samples of random tokens (--mock-data): they measure throughput, and need no files."""

import numpy as np
from numpy.typing import NDArray

from megatron.config.data.corpora import DatasetPlan
from megatron.data.datasets.run_datasets import DataRequest, Datasets
from megatron.data.sampling.provenance import Origin

_ROLES = {"train": 0, "valid": 1, "test": 2}


class RandomTokens:
    """Samples of `seq_length + 1` tokens, each drawn from the seed and its index alone.

    A run that resumes, in whichever layout, therefore reads on where it stopped.

    Shapes: sample {"tokens": [seq_length + 1] int64}.
    Randomness: uniform over the vocabulary, from (seed, role, index of the sample).
    """

    def __init__(self, num_samples: int, *, seq_length: int, vocab_size: int, seed: int, role: str):
        self._num_samples, self._length = num_samples, seq_length + 1
        self._vocab_size, self._key = vocab_size, (seed, _ROLES[role])

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> dict[str, NDArray[np.int64]]:
        draw = np.random.default_rng((*self._key, i))
        return {"tokens": draw.integers(self._vocab_size, size=self._length, dtype=np.int64)}

    def origin(self, i: int) -> Origin:
        """Return the origin of sample i: no token file."""
        return Origin("--mock-data", i, ())


def random_datasets(request: DataRequest) -> Datasets:
    """Return training, validation and test sets of random tokens for the plan's samples."""

    def build(plan: DatasetPlan, role: str) -> RandomTokens:
        return RandomTokens(
            plan.num_samples,
            seq_length=request.model.seq_length,
            vocab_size=request.model.vocabulary.vocab_size,
            seed=request.seed,
            role=role,
        )

    data = request.data
    return Datasets(
        build(data.train, "train"),
        {each.name: build(each, "valid") for each in data.valid},
        {each.name: build(each, "test") for each in data.test},
        {("train", data.train.name): []},
    )
