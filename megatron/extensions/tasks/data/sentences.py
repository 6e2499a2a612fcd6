"""Text classification and relation extraction: sentences with a label, read from columns of lines."""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import WrongDataError
from megatron.extensions.tasks.data.columns import (
    BY_LOOK,
    LABEL_NAMES,
    TEXT_NAMES,
    ColumnLine,
    Layout,
)
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
        balances: weigh a label by the mean number of sentences of a label, divided by this label's.
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


_NO_LABELS = ("label", "labels", "class", "category", "target")
"""Names of the column of labels, which no label has."""


class _Row(NamedTuple):
    sentence: str
    label: str
    line: int


def read_labelled_sentences(
    path: Path, labels: Sequence[str], layout: Layout = BY_LOOK
) -> Examples:
    """Read lines of a sentence, a tab and a label: its name, or its number from 0 on.

    Also lines with more columns: those that a header or `layout` names, and without a header an id,
    a sentence, True or False, and the relation (False: there is none). A first line whose last field
    is "label" or the like is a header; of numbered labels, one without a number.

    Raises:
        WrongDataError: the file is missing or empty, or a line has no sentence or an unknown label;
            the message names file and line.
    """
    ids = {name: number for number, name in enumerate(labels)}
    ids |= {str(number): number for number in range(len(labels)) if str(number) not in ids}
    examples: list[Example] = []
    rows = _rows(path, layout)
    numbered = all(map(str.isdecimal, labels))
    if rows and rows[0].label not in ids and _is_header(rows, layout, are_numbers=numbered):
        log.info(
            "%s, line %d: %r is taken for a header", path, rows[0].line, rows[0].label[:EXCERPT]
        )
        rows = rows[1:]
    for sentence, label, line in rows:
        if label not in ids:
            raise wrong_line(
                path,
                line,
                f"unknown label {label[:EXCERPT]!r}; labels are {', '.join(labels)}, or their "
                f"numbers from 0 to {len(labels) - 1}"
                + ("; if this line names the columns, write --header yes" if not examples else ""),
            )
        examples.append(Example((sentence,), None, ids[label], len(examples)))
    if not examples:
        raise WrongDataError(f"{path} has no sentence")
    return Examples(examples)


def sentence_labels(
    paths: Sequence[Path], num_labels: int | None = None, layout: Layout = BY_LOOK
) -> list[str]:
    """Return the labels of files in the order of their ids: numbers from 0 on, or names, sorted.

    Args:
        num_labels: how many there are, if they are numbers (default: up to the largest).

    Raises:
        WrongDataError: some labels are numbers and others names, or it is in doubt whether a first
            line is a header or the last column holds labels.
    """
    rows = []
    for path in paths:
        file_rows = _without_header(path, _rows(path, layout), layout)
        _require_labels(path, file_rows, layout)
        rows += [(path, row) for row in file_rows]
    numbers = {int(row.label) for _, row in rows if row.label.isdecimal()}
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
    count = num_labels or max(numbers) + 1
    if not num_labels and count > 2 * len(numbers):
        raise WrongDataError(
            f"{paths[0]}: labels are {len(numbers)} numbers up to {max(numbers)}, which would be "
            f"{count} classes: give --num-labels, or the names of all labels with --labels"
        )
    return [*map(str, range(count))]


def _without_header(path: Path, rows: list[_Row], layout: Layout) -> list[_Row]:
    """Return the rows without a header row.

    Raises:
        WrongDataError: it is in doubt, since its label alone is in no other line.
    """
    are_numbers = all(row.label.isdecimal() for row in rows[1:])
    if _is_header(rows, layout, are_numbers=are_numbers):
        return rows[1:]
    if layout.has_header is None and _is_doubtful(rows):
        raise wrong_line(
            path,
            rows[0].line,
            f"the label {rows[0].label[:EXCERPT]!r} is in no other line: write --header yes if this line "
            "names the columns, or --header no",
        )
    return rows


def _is_doubtful(rows: Sequence[_Row]) -> bool:
    """Whether a first line looks like names of columns: it alone has its label, or is one word."""
    if len(rows) < 3:
        return False
    counts = Counter(row.label for row in rows)
    if counts[rows[0].label] > 1:
        return False
    num_words = sum(" " not in row.sentence for row in rows[1:])
    is_only_word = " " not in rows[0].sentence and 10 * num_words < len(rows)
    return is_only_word or [*counts.values()].count(1) == 1


def _is_header(rows: Sequence[_Row], layout: Layout, *, are_numbers: bool) -> bool:
    """Whether a first line holds names of columns."""
    if layout.has_header is not None or len(rows) < 2:
        return False  # by the flag, it is already left out
    sentence, label, _ = rows[0]
    is_named = sentence.lower() in TEXT_NAMES and all(row.label != label for row in rows[1:])
    return label.lower() in _NO_LABELS or is_named or (are_numbers and not _NUMBER.fullmatch(label))


def _require_labels(path: Path, rows: Sequence[_Row], layout: Layout) -> None:
    """Refuse a last column that holds no labels, by its look.

    Raises:
        WrongDataError: labels are other numbers, in quotes, or of more kinds than there are sentences.
    """
    labels, num_sentences = {row.label for row in rows}, len({row.sentence for row in rows})
    for sentence, label, line in rows:
        if _NUMBER.fullmatch(label) and not label.isdecimal():
            problem = f"the label {label} is a number, and classes are numbered 0, 1 and so on"
        elif label[0] == label[-1] == '"' and len(label) > 1:
            problem = f"the label {label[:EXCERPT]} is in quotes, which are no part of a column"
        elif not layout.label and len(labels) > num_sentences:
            problem = (
                f"there are more labels, {len(labels)}, than sentences: the first is {label[:EXCERPT]!r} "
                f"of {sentence[:EXCERPT]!r}; --text-column and --label-column name the columns, from 1"
            )
        else:
            continue
        raise wrong_line(path, line, f"{problem}; with --labels all labels are taken as they are")


_NUMBER = re.compile(r"[-+]?\d*\.?\d+")


def _rows(path: Path, layout: Layout) -> list[_Row]:
    """Return the sentence and the label of each line, without a header that names columns.

    Raises:
        WrongDataError: a line has no tab, or lacks a column, or columns are in doubt.
    """
    lines = [ColumnLine(line, text.split("\t")) for line, text in read_lines(path)]
    if not lines:
        return []
    columns, has_header, is_relation = _columns(path, lines, layout)
    if has_header:
        log.info("%s: columns are %s", path, ", ".join(lines[0].fields))
        lines = lines[1:]
    if columns:
        return [_row_of_columns(path, *each, columns, is_relation=is_relation) for each in lines]
    found = []
    for line, fields in lines:
        *parts, label = fields
        sentence = " ".join(" ".join(parts).split())
        if not sentence or not label.strip():
            text = "\t".join(fields)[:EXCERPT]
            raise wrong_line(
                path, line, f"{text!r} is not a sentence followed by a tab and a label"
            )
        found.append(_Row(sentence, label.strip(), line))
    return found


def _columns(
    path: Path, lines: Sequence[ColumnLine], layout: Layout
) -> tuple[tuple[int, int] | None, bool, bool]:
    """Return the columns of sentence and label, whether there is a header, and whether of relations.

    None: the last column is the label, and all other columns are the sentence.

    Raises:
        WrongDataError: each line has the same number of columns, three or more, without names.
    """
    first = [name.strip().lower() for name in lines[0].fields]
    texts, labels = (
        [i for i, name in enumerate(first) if name in names] for names in (TEXT_NAMES, LABEL_NAMES)
    )
    is_named = len(texts) == len(labels) == 1 and layout.has_header is not False
    has_header = is_named or layout.has_header is True
    if layout.text or layout.label:
        text, label = layout.text or 1, layout.label or len(first)
        if text == label:
            raise wrong_line(
                path,
                lines[0].number,
                f"column {text} would be both sentence and label: give --text-column and --label-column",
            )
        return (text - 1, label - 1), has_header, False
    if is_named:
        return (texts[0], labels[0]), has_header, False
    if len(first) == 4 and first[2] in ("true", "false"):
        return (1, 3), has_header, True
    if len(first) > 2 and {len(line.fields) for line in lines} == {len(first)}:
        raise wrong_line(
            path,
            lines[0].number,
            f"each line has {len(first)} columns: --text-column and --label-column name the "
            "columns of sentence and label, from 1",
        )
    return None, has_header, False


def _row_of_columns(
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
