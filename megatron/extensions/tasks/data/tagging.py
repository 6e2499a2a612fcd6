"""Token classification (named entities): sentences with a label for each word, and their features."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import WrongDataError
from megatron.config.data.tag_schemes import OUTSIDE as PAD_LABEL
from megatron.extensions.tasks.data.columns import BY_LOOK, Layout, read_column_sentences
from megatron.extensions.tasks.data.packing import EncodedTexts
from megatron.extensions.tasks.data.task import EXCERPT, read_lines, wrong_line
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaggedSentence:
    """A sentence of a file.

    Args:
        labels: one for each word; empty in a file without labels.
        line: its number in the file `path`, or the number of its first word.
    """

    words: tuple[str, ...]
    labels: tuple[str, ...]
    path: Path
    line: int


def labels_file_of(path: Path) -> Path | None:
    """Return the file of labels next to text_NAME.txt; None for a file of another name."""
    if path.name.startswith("text_") and path.suffix == ".txt":
        return path.with_name("labels_" + path.name.removeprefix("text_"))
    return None


def read_sentences(
    path: Path, *, labelled: bool = True, layout: Layout = BY_LOOK
) -> list[TaggedSentence]:
    """Read sentences with a label for each word.

    text_NAME.txt has a sentence on each line, words with spaces between them, and labels_NAME.txt
    next to it their labels. Any other file has a word on each line, in the first column, its label
    in the last (IOB, CoNLL), and an empty line after each sentence.

    Args:
        labelled: whether labels are needed.
        layout: of a file with a word on each line.

    Raises:
        WrongDataError: a file is missing, numbers of words and labels differ, there is no sentence,
            or columns are in doubt; the message names file and line.
    """
    labels = labels_file_of(path)
    if labels is None:
        found = [
            _sentence(words, path, line)
            for line, words in read_column_sentences(path, layout, labelled=labelled)
        ]
    elif labelled or labels.exists():
        found = [*_pairs(path, labels)]
    else:
        found = [
            TaggedSentence(tuple(text.split()), (), path, line) for line, text in read_lines(path)
        ]
    if not found:
        raise WrongDataError(f"{path} has no sentence")
    return found


def _pairs(path: Path, labels: Path) -> Iterator[TaggedSentence]:
    """Yield the sentences of a file of words and one of labels."""
    texts, tags = [*read_lines(path)], [*read_lines(labels)]
    if len(texts) != len(tags):
        raise WrongDataError(f"{path} has {len(texts)} sentences, and {labels} has {len(tags)}")
    for (line, text), (number, tag) in zip(texts, tags, strict=True):
        words, names = tuple(text.split()), tuple(tag.split())
        if len(words) != len(names):
            raise wrong_line(
                path,
                line,
                f"{len(words)} words, and {labels}, line {number} has {len(names)} labels",
            )
        yield TaggedSentence(words, names, path, line)


def _sentence(words: Sequence[tuple[str, str]], path: Path, line: int) -> TaggedSentence:
    labels = tuple(label for _, label in words)
    return TaggedSentence(
        tuple(word for word, _ in words), labels if all(labels) else (), path, line
    )


def label_names(sentences: Sequence[TaggedSentence], pad_label: str = PAD_LABEL) -> list[str]:
    """Return the labels in the order of their ids: `pad_label`, then the other labels sorted."""
    names = {label for sentence in sentences for label in sentence.labels}
    return [pad_label, *sorted(names - {pad_label})]


class TaggingDataset:
    """Features of token classification: [CLS], the pieces of each word, [SEP], padding.

    A word without a piece is [UNK]. A sentence that is too long loses its end.

    Args:
        name: of the set, for messages.
        labels: names in the order of their ids.
        seq_length: tokens of a row.
        ignore_extra_tokens: leave all but the first piece of a word out of the loss.
        ignore_start_end: leave [CLS] and [SEP] out of the loss.
        balances: weigh labels in the loss by the mean number of words of a label, divided by its
            own.

    Raises:
        WrongDataError: a label is not in `labels`; the message names file and line.
        DataError: the tokenizer has no [CLS], [SEP], [PAD] or [UNK].

    Shapes: dataset[i] -> {"text", "types", "padding_mask", "labels", "first", "loss_mask":
        [seq_length], "uid": []} int64 but for float32 weights in "loss_mask"; "first" is 1 at the
        first piece of a word.
    """

    def __init__(
        self,
        sentences: Sequence[TaggedSentence],
        name: str,
        *,
        labels: Sequence[str],
        tokenizer: Tokenizer,
        seq_length: int,
        ignore_extra_tokens: bool = False,
        ignore_start_end: bool = False,
        balances: bool = False,
    ):
        self.sentences, self.name = sentences, name
        self._length = seq_length
        self._weights = (0 if ignore_start_end else 1, 0 if ignore_extra_tokens else 1)
        ids = {label: number for number, label in enumerate(labels)}
        self._outside = ids.get(PAD_LABEL, 0)
        self.has_labels = all(sentence.labels for sentence in sentences)
        self.labels = [_ids_of(sentence, ids) for sentence in sentences]
        self._label_weights = label_weights(self.labels, len(labels), balances=balances)
        special = tokenizer.special
        self._cls, self._sep, self._pad = special("cls"), special("sep"), special("pad")
        self._unk = special("unk")
        numbers: dict[str, int] = {}
        self._words = [
            np.array([numbers.setdefault(word, len(numbers)) for word in sentence.words], np.int32)
            for sentence in sentences
        ]
        self._pieces = EncodedTexts([*numbers], tokenizer)
        if cut := sum(self.num_words(i) < len(words) for i, words in enumerate(self._words)):
            log.warning(
                "%s: %d of %d sentences have more than %d tokens: words at their ends are left out, "
                "and predicted as %s",
                *(name, cut, len(sentences), seq_length, labels[self._outside]),
            )

    def __len__(self) -> int:
        return len(self.sentences)

    def num_words(self, i: int) -> int:
        """Return how many words of sentence i fit into a row, each with its first piece."""
        sizes = [max(1, len(self._pieces[int(word)])) for word in self._words[i]]
        starts = np.cumsum([0, *sizes[:-1]])
        return int((starts < self._length - 2).sum()) if sizes else 0

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        pieces = [[*self._pieces[int(word)]] or [self._unk] for word in self._words[i]]
        labels = self.labels[i] if len(self.labels[i]) else np.zeros(len(pieces), np.int64)
        start_end, extra = self._weights
        rows = {name: np.zeros(self._length, np.int64) for name in _FIELDS}
        rows["text"][:], rows["labels"][:] = self._pad, self._outside
        sizes = [len(each) for each in pieces]
        count = min(sum(sizes), self._length - 2)
        inside, end = slice(1, 1 + count), count + 1
        first = np.concatenate([[1] + [0] * (size - 1) for size in sizes])[:count]
        rows["text"][inside] = np.concatenate(pieces)[:count]
        rows["text"][[0, end]] = self._cls, self._sep
        rows["padding_mask"][: end + 1] = 1
        rows["labels"][inside] = np.repeat(labels, sizes)[:count]
        rows["first"][inside] = first
        weights = self._label_weights[rows["labels"]] * rows["padding_mask"]
        weights[inside] *= np.where(first, 1, extra)
        weights[[0, end]] *= start_end
        return rows | {"loss_mask": weights.astype(np.float32), "uid": np.array(i)}

    def word_labels(self, i: int, predicted: NDArray | Sequence[int]) -> NDArray[np.int64]:
        """Return the predicted label of each word of sentence i: the label of its first piece.

        Words that were cut off are outside of all entities.

        Shapes: predicted [seq_length] -> [words].
        """
        found = np.full(len(self._words[i]), self._outside)
        at_first = np.flatnonzero(self[i]["first"])
        found[: len(at_first)] = np.asarray(predicted)[at_first]
        return found


_FIELDS = ("text", "types", "padding_mask", "labels", "first")


def label_weights(
    labels: Sequence[NDArray], num_labels: int, *, balances: bool
) -> NDArray[np.float64]:
    """Return the weight of each label in the loss; labels without a word have weight 1.

    Shapes: -> [num_labels].
    """
    counts = np.bincount(np.concatenate(labels).astype(np.int64), minlength=num_labels)
    if not balances or not counts.sum():
        return np.ones(num_labels)
    present = counts > 0
    return np.where(present, counts.sum() / present.sum() / np.maximum(counts, 1), 1.0)


def name_of(path: Path) -> str:
    """Return the name of a set of sentences: NAME of text_NAME.txt, or of NAME.conll."""
    return path.name.removesuffix(path.suffix).removeprefix("text_")


def _ids_of(sentence: TaggedSentence, ids: Mapping[str, int]) -> NDArray[np.int64]:
    """Return the ids of the labels of a sentence.

    Raises:
        WrongDataError: a label is unknown.
    """
    for word, label in zip(sentence.words, sentence.labels, strict=False):
        if label not in ids:
            known = ", ".join(ids)
            raise wrong_line(
                labels_file_of(sentence.path) or sentence.path,
                sentence.line,
                f"unknown label {label!r} of the word {word[:EXCERPT]!r}; labels are {known}",
            )
    return np.array([ids[label] for label in sentence.labels], np.int64)
