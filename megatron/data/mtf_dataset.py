"""Samples for multitask finetuning: inputs and their targets, several pairs to a row."""

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.index_cache import cached_maps, cached_sizes
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.origin import Origin, Piece
from megatron.data.packing import Packing, pack
from megatron.errors import DataError

log = logging.getLogger(__name__)


class MTFDataset:
    """Sample i is a pure function of the arguments: as many whole pairs as fit, then padding.

    Nothing is put between input and target, nor behind the target: preprocessing appends the
    end-of-document token to targets. Padding is token 0, which no other token sees and no loss
    counts.

    Args:
        inputs: one sequence for each pair.
        targets: likewise, in the same order.
        pairs: the part to use.
        num_samples: how many are wanted; pairs repeat until there are at least as many.
        cache_directory: where the packing is kept; see `cached_maps`.

    Raises:
        DataError: inputs and targets are not as many, or none of `pairs` fits into a sample.

    Shapes: dataset[i] -> [3, seq_length + 1] int64: tokens; number of the pair in the sample from
        1 up, 0 for padding; position of the first token of the pair's target.
    """

    def __init__(
        self,
        inputs: IndexedDataset,
        targets: IndexedDataset,
        pairs: range,
        *,
        num_samples: int,
        seq_length: int,
        seed: int,
        cache_directory: str | Path | None = None,
    ):
        if len(inputs) != len(targets):
            raise DataError(
                f"{inputs.prefix} has {len(inputs)} sequences and {targets.prefix} has "
                f"{len(targets)}: each input needs its target; make both from the same file"
            )
        self.inputs, self.targets = inputs, targets
        self.row_length = seq_length + 1
        self._num_pairs = len(pairs)

        def build() -> dict[str, NDArray]:
            inputs.verify()
            targets.verify()
            sizes = (part.sizes[pairs.start : pairs.stop] for part in (inputs, targets))
            lengths = np.add(*sizes, dtype=np.int64)
            self._warn_of_long(lengths)
            try:
                packing = pack(
                    lengths, pairs, num_rows=num_samples, row_length=self.row_length, seed=seed
                )
            except ValueError as error:
                raise DataError(
                    f"{inputs.prefix}, pairs {pairs.start} to {pairs.stop}: {error} "
                    "(--seq-length + 1); use a longer --seq-length"
                ) from error
            return dict(vars(packing))

        sizes = [cached_sizes(part, pairs, directory=cache_directory) for part in (inputs, targets)]
        digests = [each.digest for each in sizes]
        self.num_tokens = sum(each.num_tokens for each in sizes)
        maps = cached_maps(
            f"pairs {pairs} {num_samples} {seq_length} {seed} {digests}",
            {"pair_order": (None,), "row_starts": (None,)},
            build,
            prefix=inputs.prefix,
            directory=cache_directory,
        )
        self.packing = Packing(**maps)

    def __len__(self) -> int:
        return len(self.packing.row_starts) - 1

    def __getitem__(self, i: int) -> NDArray:
        tokens, pairs, targets_start = row = np.zeros((3, self.row_length), np.int64)
        start = 0
        for number, pair in enumerate(self._pairs(i), start=1):
            texts = [part[pair] for part in (self.inputs, self.targets)]
            middle = start + len(texts[0])
            stop = middle + len(texts[1])
            tokens[start:middle], tokens[middle:stop] = texts
            pairs[start:stop] = number
            targets_start[start:stop] = middle
            start = stop
        return row

    def epochs(self, num_samples: int) -> float:
        """Return how often the pairs are read by `num_samples` samples."""
        return int(self.packing.row_starts[num_samples]) / self._num_pairs

    def origin(self, i: int) -> Origin:
        """Return which pairs sample i holds; the tokens of a piece are those of both its parts."""
        return Origin(
            self.inputs.prefix,
            i,
            tuple(
                Piece(pair, 0, int(self.inputs.sizes[pair] + self.targets.sizes[pair]))
                for pair in self._pairs(i)
            ),
        )

    def _pairs(self, i: int) -> list[int]:
        start, stop = self.packing.row_starts[i : i + 2].tolist()
        return self.packing.pair_order[start:stop].tolist()

    def _warn_of_long(self, lengths: NDArray) -> None:
        if num_long := int((lengths > self.row_length).sum()):
            log.warning(
                "%s: %d of %d pairs are left out: they are longer than a sample of %d tokens "
                "(--seq-length + 1)",
                *(self.inputs.prefix, num_long, len(lengths), self.row_length),
            )
