"""Text classification and relation extraction: sentences with a label, read from columns of lines."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import WrongDataError
from megatron.extensions.tasks.data.metrics import Score, confusion_matrix
from megatron.extensions.tasks.data.tagging import label_weights
from megatron.extensions.tasks.data.task import EXCERPT, Predicted, read_lines, wrong_line
from megatron.extensions.tasks.data.task_dataset import (
    ClassificationTask,
    Example,
    Examples,
    TaskDataset,
)
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SentenceTask(ClassificationTask):
    """Text classification: accuracy, and of relation extraction precision, recall and F1.

    Args:
        negative_label: class of sentences without a relation; "" if there is none.
        balances: whether rare classes weigh more in the loss.
    """

    negative_label: str = ""
    balances: bool = False

    def data(
        self, paths: Sequence[Path], *, tokenizer: Tokenizer, seq_length: int, trains: bool
    ) -> "SentenceDataset":
        """Return the packed sentences of files; training weighs their labels.

        Raises:
            WrongDataError: a file is missing or malformed.
        """
        return SentenceDataset(
            self,
            paths,
            tokenizer=tokenizer,
            seq_length=seq_length,
            balances=trains and self.balances,
        )

    def metrics(self, predicted: Sequence[Predicted]) -> dict[str, float]:
        """Return the accuracy; of relations also the micro averages of all classes but the negative."""
        found = super().metrics(predicted)
        if not self.negative_label:
            return found
        matrix = confusion_matrix(*self._values_and_labels(predicted), len(self.classes))
        relations = [i for i, name in enumerate(self.classes) if name != self.negative_label]
        score = Score.of(
            int(matrix.diagonal()[relations].sum()),
            int(matrix.sum(0)[relations].sum()),
            int(matrix.sum(1)[relations].sum()),
        )
        return found | {
            "relation precision": score.precision,
            "relation recall": score.recall,
            "relation f1": score.f1,
        }

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return the F1 of relations, or the accuracy."""
        return metrics.get("relation f1", metrics["accuracy"])


class SentenceDataset(TaskDataset):
    """Packed sentences with the weight of their labels in the loss, as item "label_weight".

    Args:
        balances: weigh a label by the mean number of sentences of a label, divided by its own.
    """

    def __init__(
        self,
        task: ClassificationTask,
        paths: Sequence[Path],
        *,
        tokenizer: Tokenizer,
        seq_length: int,
        balances: bool,
    ):
        super().__init__(task, paths, tokenizer=tokenizer, seq_length=seq_length)
        weights = label_weights([self.labels], len(task.classes), balances=balances)
        self._label_weights = weights.astype(np.float32)
        counts = np.bincount(self.labels, minlength=len(task.classes))
        numbers = ", ".join(f"{n} {c}" for n, c in zip(task.classes, counts, strict=True))
        log.info("%s: sentences of each label: %s", self.name, numbers)

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        return super().__getitem__(i) | {"label_weight": self._label_weights[self.labels[i], ...]}


_COLUMN_NAMES = ("label", "labels", "class", "category", "target")
"""Names of the column of labels, which no label has."""


class _Row(NamedTuple):
    sentence: str
    label: str
    line: int


def read_labelled_sentences(path: Path, labels: Sequence[str]) -> Examples:
    """Read lines of a sentence, a tab and a label: its name, or its number from 0 on.

    Also lines with more columns: those that a header names (index, sentence, label), and without a
    header an id, a sentence, True or False, and the relation (False: there is none). A first line
    whose last field is "label" or the like is a header; of numbered labels, one without a number.

    Raises:
        WrongDataError: the file is missing or empty, or a line has no sentence or an unknown label;
            the message names file and line.
    """
    ids = {name: number for number, name in enumerate(labels)}
    ids |= {str(number): number for number in range(len(labels)) if str(number) not in ids}
    examples: list[Example] = []
    rows = _rows(path)
    for number, (sentence, label, line) in enumerate(rows):
        if label not in ids:
            if number == 0 < len(rows) - 1 and _is_header(
                label, are_numbers=all(map(str.isdecimal, labels))
            ):
                log.info("%s, line %d: %r is taken for a header", path, line, label[:EXCERPT])
                continue
            raise wrong_line(
                path,
                line,
                f"unknown label {label[:EXCERPT]!r}; labels are {', '.join(labels)}, or their "
                f"numbers from 0 to {len(labels) - 1}",
            )
        examples.append(Example((sentence,), None, ids[label], len(examples)))
    if not examples:
        raise WrongDataError(f"{path} has no sentence")
    return Examples(examples)


def sentence_labels(paths: Sequence[Path], num_labels: int | None = None) -> list[str]:
    """Return the labels of files in the order of their ids: numbers from 0 on, or names, sorted.

    Args:
        num_labels: how many there are, if they are numbers (default: up to the largest).

    Raises:
        WrongDataError: some labels are numbers and others names.
    """
    rows = [(path, row) for path in paths for row in _without_header(_rows(path))]
    numbers = [int(row.label) for _, row in rows if row.label.isdecimal()]
    if not numbers:
        return sorted({row.label for _, row in rows})
    for path, row in rows:
        if not row.label.isdecimal():
            raise wrong_line(
                path,
                row.line,
                f"the label {row.label[:EXCERPT]!r} is not a number, and other labels are: give the "
                "names of all labels with --labels",
            )
    return [*map(str, range(num_labels or max(numbers) + 1))]


def _without_header(rows: list[_Row]) -> list[_Row]:
    """Return the rows without a first one that names the columns of others."""
    are_numbers = all(row.label.isdecimal() for row in rows[1:])
    has_header = len(rows) > 1 and _is_header(rows[0].label, are_numbers=are_numbers)
    return rows[1:] if has_header else rows


def _is_header(label: str, *, are_numbers: bool) -> bool:
    """Whether the last field of a first line is the name of a column."""
    return label.lower() in _COLUMN_NAMES or (are_numbers and not label.isdecimal())


def _rows(path: Path) -> list[_Row]:
    """Return the sentence and the label of each line, without a header that names columns.

    Raises:
        WrongDataError: a line has no tab, or lacks a column.
    """
    lines = [(line, text.split("\t")) for line, text in read_lines(path)]
    first = [name.strip().lower() for name in lines[0][1]] if lines else []
    relations = len(first) == 4 and first[2] in ("true", "false")
    if has_header := {"sentence", "label"} <= {*first}:
        log.info("%s: columns are %s", path, ", ".join(first))
        lines = lines[1:]
    if relations or (has_header and len(first) > 2):
        columns = (1, 3) if relations else (first.index("sentence"), first.index("label"))
        return [_of_columns(path, *each, columns, is_relation=relations) for each in lines]
    found = []
    for line, fields in lines:
        *parts, label = fields
        sentence = " ".join(" ".join(parts).split())
        if not sentence or not label.strip():
            text = "\t".join(fields)[:EXCERPT]
            raise wrong_line(
                path, line, f"{text!r} is no sentence with a tab and a label behind it"
            )
        found.append(_Row(sentence, label.strip(), line))
    return found


def _of_columns(
    path: Path, line: int, fields: list[str], columns: tuple[int, int], *, is_relation: bool
) -> _Row:
    """Return sentence and label of a line, given their columns."""
    if len(fields) <= max(columns):
        text = "\t".join(fields)[:EXCERPT]
        raise wrong_line(
            path, line, f"{text!r} has {len(fields)} columns; expected {max(columns) + 1}"
        )
    sentence, label = (" ".join(fields[column].split()) for column in columns)
    if is_relation and fields[2].strip().lower() == "false":
        label = fields[2].strip()
    if not sentence or not label:
        raise wrong_line(path, line, "the sentence or the label is empty")
    return _Row(sentence, label, line)
