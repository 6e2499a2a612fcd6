"""Packing: several texts to a sample, of prompts with targets (multi-task) or conversations."""

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.common.registry import KINDS
from megatron.data.datasets.kinds import Kind
from megatron.data.sampling.index_cache import cached_maps, cached_sizes
from megatron.data.sampling.index_map import IndexMap
from megatron.data.sampling.index_size import packing_room
from megatron.data.sampling.provenance import Origin, Piece
from megatron.data.token_files.indexed_dataset import IndexedDataset


@dataclass(frozen=True)
class Packing:
    """Row r holds the pairs `pair_order[row_starts[r] : row_starts[r + 1]]`."""

    pair_order: IndexMap
    row_starts: IndexMap


def fitting(lengths: NDArray, row_length: int) -> NDArray:
    """Return a mask of the pairs that fit a row. Shapes: lengths [pairs] -> [pairs] bool."""
    return (lengths > 0) & (lengths <= row_length)


def pack(lengths: NDArray, pairs: range, *, num_rows: int, row_length: int, seed: int) -> Packing:
    """Pack `pairs` into at least `num_rows` rows, going through all of them as often as needed.

    A row takes pairs in their order until the next one does not fit. An open row at the end of an
    epoch is filled up from the next. Pairs that are empty or longer than a row are left out.

    Args:
        lengths: tokens of each of `pairs`, input and target together.

    Raises:
        ValueError: no pair fits.

    Shapes: lengths [len(pairs)] int64 -> pair_order [pairs used], row_starts [rows + 1] int64.
    Randomness: one generator, numpy.random.RandomState(seed), shuffles each epoch in turn.
    """
    fits = fitting(lengths, row_length)
    if not fits.any():
        raise ValueError(f"none of them fits into {row_length} tokens")
    rng = np.random.RandomState(seed % 2**32)
    closed: list[NDArray] = []
    starts, before = [0], 0
    waiting = np.array([], np.int64)
    while len(starts) <= num_rows:
        epoch = np.arange(len(pairs))
        rng.shuffle(epoch)
        waiting = np.concatenate([waiting, epoch[fits[epoch]]])
        ends = np.cumsum(lengths[waiting])
        start = 0
        while True:
            taken = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, taken + row_length, side="right"))
            if stop == len(waiting):
                break
            starts.append(before + stop)
            start = stop
        closed.append(waiting[:start])
        before += start
        waiting = waiting[start:]
    return Packing(np.concatenate(closed) + pairs.start, np.array(starts, np.int64))


log = logging.getLogger(__name__)


class PackedDataset(ABC):
    """Sample i is a pure function of the arguments: as many uncut texts as fit, then padding.

    Padding is token 0, which no other token sees and no loss counts. Subclasses define the
    length of a text and its fields in a row.

    Args:
        parts: token files with a sequence for each text each; the first names the corpus.
        texts: the part to use.
        num_samples: how many are wanted; texts repeat until there are at least as many.
        cache_directory: where the packing is kept; see `cached_maps`.

    Raises:
        DataError: the files do not belong together, or none of `texts` fits into a sample.
    """

    noun: str
    """Word for a text in messages."""

    def __init__(
        self,
        parts: Sequence[IndexedDataset],
        texts: range,
        *,
        num_samples: int,
        seq_length: int,
        seed: int,
        cache_directory: str | Path | None = None,
    ):
        self.row_length = seq_length + 1
        self._parts, self._first, self._texts = parts, parts[0], texts

        def build() -> dict[str, NDArray]:
            lengths = self.lengths(texts)
            self._warn_of_long(lengths)
            try:
                packing = pack(
                    lengths, texts, num_rows=num_samples, row_length=self.row_length, seed=seed
                )
            except ValueError as error:
                raise DataError(
                    f"{parts[0].prefix}, {self.noun}s {texts.start} to {texts.stop}: {error} "
                    "(--seq-length + 1); use a longer --seq-length"
                ) from error
            return dict(vars(packing))

        sizes = [cached_sizes(part, texts, directory=cache_directory) for part in parts]
        digests = [each.digest for each in sizes]
        self.num_tokens = sum(each.num_tokens for each in sizes)
        maps = cached_maps(
            f"{self.noun}s {texts} {num_samples} {seq_length} {seed} {digests}",
            {"pair_order": (None,), "row_starts": (None,)},
            build,
            packing_room(parts[0].prefix, self.noun, num_samples),
            prefix=parts[0].prefix,
            directory=cache_directory,
        )
        self.packing = Packing(**maps)

    @abstractmethod
    def lengths(self, texts: range) -> NDArray:
        """Return the tokens of each of `texts` in a row, counted. Shapes: -> [len(texts)] int64."""

    @abstractmethod
    def __getitem__(self, i: int) -> dict[str, NDArray]:
        """Return sample i."""

    def __len__(self) -> int:
        return len(self.packing.row_starts) - 1

    def epochs(self, num_samples: int) -> float:
        """Return the number of epochs that `num_samples` samples take."""
        return int(self.packing.row_starts[num_samples]) / len(self._texts)

    def size_for(self, num_samples: int) -> int:
        """Return the number of samples in as many epochs as `num_samples` need.

        That many itself if it is more than there are here: how many more is not known.
        """
        num_fitting = int(fitting(self.lengths(self._texts), self.row_length).sum())
        # An epoch closes the rows after which it has another text.
        starts = self.packing.row_starts
        size = epochs = 0
        while size < min(num_samples, len(self)):
            epochs += 1
            size = bisect_left(starts, epochs * num_fitting, lo=1) - 1
        return max(size, num_samples)

    def origin(self, i: int) -> Origin:
        """Return the texts packed in sample i; the tokens of a piece are all that it has there."""
        return Origin(
            self._first.prefix,
            i,
            tuple(Piece(text, 0, length) for text, _, length in self.placements(i)),
        )

    def placements(self, i: int) -> Iterator[tuple[int, int, int]]:
        """Yield each text of sample i, where it begins, and how long it is."""
        for part in self._parts:
            part.require_whole_index()
        start, stop = self.packing.row_starts[i : i + 2].tolist()
        offset = 0
        for text in self.packing.pair_order[start:stop].tolist():
            length = int(self.lengths(range(text, text + 1))[0])
            yield text, offset, length
            offset += length

    def _warn_of_long(self, lengths: NDArray) -> None:
        if num_long := int((lengths > self.row_length).sum()):
            log.warning(
                "%s: %d of %d %ss are left out: they are longer than a sample of %d tokens "
                "(--seq-length + 1)",
                *(self._first.prefix, num_long, len(lengths), self.noun, self.row_length),
            )


class ChatDataset(PackedDataset):
    """Packing of conversations: as many uncut ones as fit; see PackedDataset.

    Args:
        tokens: one sequence for each conversation.
        loss_mask: as long, 1 where the token counts, 0 elsewhere.

    Raises:
        DataError: the files do not belong together, or no conversation fits into a sample.

    Shapes: dataset[i] -> {"tokens", "text_ids", "is_target"}, each [seq_length + 1] int64: the
        number of the conversation in the sample from 1 up, 0 for padding; 1 where the token counts.
    """

    noun = "conversation"

    def __init__(
        self, tokens: IndexedDataset, loss_mask: IndexedDataset, chats: range, **options: Any
    ):
        if not np.array_equal(tokens.sizes, loss_mask.sizes):
            raise DataError(
                f"{tokens.prefix} and {loss_mask.prefix} do not have as many tokens for each "
                "conversation: make both with tools/preprocess_data.py --conversations"
            )
        self.tokens, self.loss_mask = tokens, loss_mask
        super().__init__((tokens, loss_mask), chats, **options)
        self.num_tokens //= 2  # the mask is none

    def lengths(self, texts: range) -> NDArray:
        """Return the number of tokens of each conversation."""
        return self.tokens.sizes[texts.start : texts.stop].astype(np.int64)

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        tokens, text_ids, is_target = np.zeros((3, self.row_length), np.int64)
        for number, (chat, start, length) in enumerate(self.placements(i), start=1):
            here = slice(start, start + length)
            tokens[here], is_target[here] = self.tokens[chat], self.loss_mask[chat]
            text_ids[here] = number
        return {"tokens": tokens, "text_ids": text_ids, "is_target": is_target}


class MTFDataset(PackedDataset):
    """Packing of input-target pairs: as many uncut ones as fit; see PackedDataset.

    Nothing is inserted between input and target, or after the target: preprocessing appends the
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
        for number, (pair, start, length) in enumerate(self.placements(i), start=1):
            middle, stop = start + int(self.inputs.sizes[pair]), start + length
            tokens[start:middle], tokens[middle:stop] = self.inputs[pair], self.targets[pair]
            text_ids[start:stop] = number
            target_starts[start:stop] = middle
        return {"tokens": tokens, "text_ids": text_ids, "target_starts": target_starts}


@KINDS.register("pairs")
class Pairs(Kind):
    """Inputs and targets. Uncut texts are packed in turn: no epoch of theirs is shuffled by itself."""

    dataset = MTFDataset


@KINDS.register("conversations")
class Conversations(Kind):
    """Conversations with the mask of their loss, packed as `Pairs` are."""

    dataset = ChatDataset
