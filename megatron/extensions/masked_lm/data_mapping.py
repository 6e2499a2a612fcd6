"""Sentence mapping: the sentences of sample i, for BERT and T5, as Megatron's build_mapping cuts them.

Documents are cut into runs of complete sentences until a target length is reached. The target is
the longest that fits, or now and then a shorter one that is drawn at random.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.extensions.masked_lm.mersenne_twister import shuffled_order

LONGEST_SENTENCE = 512
"""A document of several sentences is left out if one of them has more tokens."""

_CHUNK = 1 << 18  # sentences looked at in one go, so that temporary arrays stay small
_WORDS = 1 << 15  # random numbers drawn in one go
_JUMP = 16  # full-length samples skipped at once, a power of two
_NEVER = 1 << 62


@dataclass(frozen=True)
class Unused:
    """Documents of a corpus that give no sample, by reason."""

    empty: int
    short: int  # fewer sentences than a sample needs
    long: int  # with a sentence above LONGEST_SENTENCE

    def __str__(self) -> str:
        return (
            f"{self.empty} without a sentence, {self.short} with fewer sentences than a sample "
            f"needs, {self.long} with a sentence of more than {LONGEST_SENTENCE} tokens"
        )


class NoUsableDocument(ValueError):
    """No document of a corpus gives a sample; the text holds the counts of `Unused`."""


@dataclass(frozen=True)
class SentenceMapping:
    """Rows of first sentence, sentence after the last, and target length, shuffled.

    Shapes: rows [samples, 3] uint32, or uint64 where sentence numbers need it;
        epoch_ends [epochs] int64, rows in all epochs up to and with each.
    """

    rows: NDArray
    epoch_ends: NDArray


def build_sentence_mapping(
    sizes: NDArray,
    document_starts: NDArray,
    *,
    num_samples: int,
    max_length: int,
    short_seq_prob: float,
    seed: int,
    min_sentences: int,
    max_epochs: int = _NEVER,
) -> SentenceMapping:
    """Build the mapping of the documents between `document_starts`.

    An epoch that begins is finished, so there are usually more rows than `num_samples`.

    Args:
        sizes: tokens of each sentence of the token files.
        document_starts: first sentence of each document, and the end of the last.
        num_samples: epochs begin until there are as many.
        max_length: tokens of a sample, without special ones; at least 2.
        short_seq_prob: share of the samples with a shorter target.
        seed: above 0.
        min_sentences: of a sample, 1 or 2.

    Raises:
        NoUsableDocument: no document gives a sample.

    Shapes: sizes [sentences] int32; document_starts [documents + 1] int64.
    Randomness: std::mt19937(seed) for the targets, std::mt19937_64(seed + 1) for the order.
    Source: BigScience's Megatron-DeepSpeed and Megatron-LM, whose rows these are.
    """
    dtype = np.uint64 if len(sizes) > np.iinfo(np.uint32).max else np.uint32
    walk = _Walk(_Shorter(max_length, short_seq_prob, seed), max_length, min_sentences)
    ranges = list(_chunks(document_starts))
    chunk = None
    parts: list[NDArray] = []
    epoch_ends: list[int] = []
    total = 0
    while total < num_samples and len(epoch_ends) < max_epochs:
        for first, stop in ranges:
            if chunk is None:
                starts = document_starts[first : stop + 1]
                chunk = _prepare(sizes, starts, max_length, min_sentences)
            total += walk.through(chunk)
            # Epochs of a small corpus are laid out several at a time.
            if len(ranges) > 1 or walk.num_strides > _WORDS:
                parts.append(walk.rows(chunk, dtype))
            if len(ranges) > 1:
                chunk = None
        epoch_ends.append(total)
        if not total:
            raise NoUsableDocument(str(count_unused(sizes, document_starts, min_sentences)))
    if chunk:
        parts.append(walk.rows(chunk, dtype))
    rows = np.concatenate(parts) if parts else np.empty((0, 3), dtype)
    parts.clear()
    order = shuffled_order(seed + 1, total)
    return SentenceMapping(rows.take(order, axis=0), np.array(epoch_ends, np.int64))


def count_unused(sizes: NDArray, document_starts: NDArray, min_sentences: int) -> Unused:
    """Count the documents that give no sample."""
    empty = short = long = 0
    for first, stop in _chunks(document_starts):
        starts = document_starts[first : stop + 1]
        counts = np.diff(starts)
        is_short = counts < min_sentences
        empty += int((counts == 0).sum())
        short += int((is_short & (counts > 0)).sum())
        long += int((_has_long(sizes, starts) & ~is_short).sum())
    return Unused(empty, short, long)


def has_usable_document(sizes: NDArray, document_starts: NDArray, min_sentences: int) -> bool:
    """Whether a document gives a sample; looks no further than the first that does."""
    return any(
        _usable(sizes, document_starts[first : stop + 1], min_sentences).any()
        for first, stop in _chunks(document_starts)
    )


def _chunks(document_starts: NDArray) -> Iterator[tuple[int, int]]:
    """Yield ranges of documents of about _CHUNK sentences together."""
    first, num_documents = 0, len(document_starts) - 1
    while first < num_documents:
        limit = int(document_starts[first]) + _CHUNK
        stop = int(np.searchsorted(document_starts, limit, side="right")) - 1
        # Documents without a sentence take room as well.
        stop = min(max(stop, first + 1), first + _CHUNK, num_documents)
        yield first, stop
        first = stop


def _usable(sizes: NDArray, starts: NDArray, min_sentences: int) -> NDArray:
    return (np.diff(starts) >= min_sentences) & ~_has_long(sizes, starts)


def _has_long(sizes: NDArray, starts: NDArray) -> NDArray:
    is_long = sizes[starts[0] : starts[-1]] > LONGEST_SENTENCE
    before = np.concatenate([[0], np.cumsum(is_long)])
    return (np.diff(starts) > 1) & (np.diff(before[starts - starts[0]]) > 0)


@dataclass(frozen=True)
class _Chunk:
    """Documents as a walk of samples sees them: a list of nodes, each the start of a sample.

    The nodes of a document are its sentences and, after them, its end. A draw of a target takes
    the walk from a sentence to the one after the sample, or to the end, and from an end, where the
    target is thrown away, to the next document.

    Shapes: sentences [nodes + 1], number of the sentence, at an end of the next sentence;
        ends [nodes + 1], node of the document's end; tokens [nodes + 1], before each node;
        jumps: node after 1, 2, 4, 8 and 16 full-length samples, each [nodes + 1].
    """

    sentences: NDArray
    ends: NDArray
    tokens: NDArray
    jumps: list[NDArray]
    num_documents: int

    @property
    def num_nodes(self) -> int:
        """The number of nodes: one past the last."""
        return len(self.ends) - 1


def _prepare(sizes: NDArray, starts: NDArray, max_length: int, min_sentences: int) -> _Chunk:
    counts = np.diff(starts)
    used = np.flatnonzero(_usable(sizes, starts, min_sentences))
    counts = counts[used] + 1
    last = np.cumsum(counts) - 1  # the node of each document's end
    num_nodes = int(last[-1]) + 1 if len(last) else 0
    first_nodes = last + 1 - counts
    nodes = np.arange(num_nodes + 1)
    sentences = nodes[:-1] + np.repeat(starts[used] - first_nodes, counts)
    ends = np.append(np.repeat(last, counts), num_nodes)
    # The end of the last document may be the end of the file, where there is no sentence.
    near = sizes[starts[0] : starts[-1]]
    node_sizes = near.take(sentences - starts[0], mode="clip").astype(np.int64)
    node_sizes[last] = 0
    tokens = np.concatenate([[0], np.cumsum(node_sizes)])
    following = np.searchsorted(tokens, tokens + max_length)
    np.maximum(following, nodes + min_sentences, out=following)
    following = np.where(following + 1 < ends, following, ends)
    following[last] = last + 1
    following[num_nodes] = num_nodes
    jumps = [following]
    while 1 << len(jumps) <= _JUMP:
        jumps.append(jumps[-1][jumps[-1]])
    return _Chunk(sentences, ends, tokens, jumps, len(used))


class _Shorter:
    """Draws of targets: how many full-length ones come before the next shorter one, and that one."""

    def __init__(self, max_length: int, short_seq_prob: float, seed: int):
        # C++ rounds halves away from zero.
        self._ratio = int(1 / short_seq_prob + 0.5) if short_seq_prob else 0
        self._max_length = max_length
        self._generator = np.random.MT19937()
        # As std::mt19937 is seeded; MT19937(seed) begins in another state.
        state: Any = np.random.RandomState(seed).get_state(legacy=False)
        self._generator.state = state

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return chain.from_iterable(self._blocks())

    def _blocks(self) -> Iterator[Iterator[tuple[int, int]]]:
        full = 0
        while self._ratio:
            words = self._generator.random_raw(_WORDS)
            at = np.flatnonzero(words % self._ratio == 0)
            if not len(at):
                full += _WORDS
                continue
            gaps = np.diff(at, prepend=-1) - 1
            gaps[0] += full
            full = _WORDS - 1 - int(at[-1])
            targets = 2 + words[at] % (self._max_length - 1)
            yield zip(gaps.tolist(), targets.tolist(), strict=True)
        yield iter([(_NEVER, self._max_length)])


class _Walk:
    """Walks through documents from sample to sample; the draws go on from chunk to chunk.

    A stride is a number of draws, each but the last of a full-length target; so may be the last.
    """

    def __init__(self, shorter: _Shorter, max_length: int, min_sentences: int):
        self._draws = iter(shorter)
        self._max_length = max_length
        self._min_sentences = min_sentences
        self._full, self._target = next(self._draws)  # full-length draws, then the target
        self._starts: list[int] = []  # node of each stride
        self._lengths: list[int] = []
        self._targets: list[int] = []  # the shorter one that ends each stride, or 0

    @property
    def num_strides(self) -> int:
        """Strides since `rows` was called."""
        return len(self._starts)

    def rows(self, chunk: _Chunk, dtype: type[np.unsignedinteger]) -> NDArray:
        """Return the rows of all strides, which were of this chunk. Shapes: -> [rows, 3]."""
        lengths = np.array(self._lengths, np.int64)
        path = _nodes_of(chunk, np.array(self._starts, np.int64), lengths)
        target = np.full(len(path), self._max_length, dtype)
        shorter = np.array(self._targets, dtype)
        target[(np.cumsum(lengths) - 1)[shorter > 0]] = shorter[shorter > 0]
        found = np.flatnonzero(path != chunk.ends[path])
        rows = np.empty((len(found), 3), dtype)
        rows[:, 0] = chunk.sentences[path[found]]
        rows[:, 1] = chunk.sentences[path[found + 1]]  # a document's end has a separate draw
        rows[:, 2] = target[found]
        for each in (self._starts, self._lengths, self._targets):
            each.clear()
        return rows

    def through(self, chunk: _Chunk) -> int:
        """Walk through a chunk, up to 16 full-length samples at a time; return the rows."""
        one, two, four, eight, many = (jump.data for jump in chunk.jumps)
        tokens, ends, stop = chunk.tokens.data, chunk.ends.data, chunk.num_nodes
        starts, lengths, targets = self._starts, self._lengths, self._targets
        node, full, target, fewest = 0, self._full, self._target, self._min_sentences
        before, draws = len(starts), self._draws
        while node < stop:
            start = node
            if full >= _JUMP:
                node, count, shorter = many[node], _JUMP, 0
            else:
                if full & 8:
                    node = eight[node]
                if full & 4:
                    node = four[node]
                if full & 2:
                    node = two[node]
                if full & 1:
                    node = one[node]
                count, shorter = full, target
            if node >= stop:  # the chunk ends before, or exactly there
                node, count, shorter = start, 0, 0
                while node < stop:
                    node, count = one[node], count + 1
            if shorter:
                end = ends[node]
                if node == end:
                    node += 1
                else:
                    limit = tokens[node] + target
                    reached = bisect_left(tokens, limit, node + fewest, one[node])
                    node = reached if reached + 1 < end else end
                count += 1
                full, target = next(draws)
            else:
                full -= count
            starts.append(start)
            lengths.append(count)
            targets.append(shorter)
        self._full, self._target = full, target
        return sum(lengths[before:]) - chunk.num_documents


def _nodes_of(chunk: _Chunk, starts: NDArray, lengths: NDArray) -> NDArray:
    """Return the nodes of all strides, from each start on by full-length samples."""
    path = np.empty(int(lengths.sum()), np.int64)
    order = np.argsort(-lengths, kind="stable")
    nodes, positions = starts[order], (np.cumsum(lengths) - lengths)[order]
    # Strides of the same length or more go on together.
    going = np.searchsorted(-lengths[order], -np.arange(_JUMP + 1), side="left")
    following = chunk.jumps[0]
    for step in range(int(lengths.max(initial=0))):
        count = int(going[step])
        path[positions[:count] + step] = nodes[:count]
        nodes = following[nodes[:count]]
    return path
