"""Samples for multitask finetuning: inputs and their targets, several pairs to a row."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.data.datasets.packed_dataset import PackedDataset
from megatron.data.token_files.indexed_dataset import IndexedDataset


class MTFDataset(PackedDataset):
    """Packing of input-target pairs: as many uncut ones as fit; see PackedDataset.

    Nothing is put between input and target, nor behind the target: preprocessing appends the
    end-of-document token to targets.

    Args:
        inputs: one sequence for each pair.
        targets: likewise, in the same order.

    Raises:
        DataError: inputs and targets are not as many, or none of `pairs` fits into a sample.

    Shapes: dataset[i] -> {"tokens", "text_ids", "target_starts"}, each [seq_length + 1] int64: the
        number of the pair in the sample from 1 up, 0 for padding; position of the first token of
        the pair's target.
    """

    noun = "pair"

    def __init__(
        self, inputs: IndexedDataset, targets: IndexedDataset, pairs: range, **options: Any
    ):
        if len(inputs) != len(targets):
            raise DataError(
                f"{inputs.prefix} has {len(inputs)} sequences and {targets.prefix} has "
                f"{len(targets)}: each input needs its target; make both from the same file"
            )
        self.inputs, self.targets = inputs, targets
        super().__init__((inputs, targets), pairs, **options)

    def lengths(self, texts: range) -> NDArray:
        """Return the number of tokens of input and target together, for each pair."""
        sizes = (part.sizes[texts.start : texts.stop] for part in (self.inputs, self.targets))
        return np.add(*sizes, dtype=np.int64)

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        tokens, text_ids, target_starts = np.zeros((3, self.row_length), np.int64)
        for number, (pair, start, length) in enumerate(self.placed(i), start=1):
            middle, stop = start + int(self.inputs.sizes[pair]), start + length
            tokens[start:middle], tokens[middle:stop] = self.inputs[pair], self.targets[pair]
            text_ids[start:stop] = number
            target_starts[start:stop] = middle
        return {"tokens": tokens, "text_ids": text_ids, "target_starts": target_starts}
