"""Datasets of classification tasks: examples read from files, and their items for a network."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import WrongDataError
from megatron.data.downstream.packing import EncodedTexts, SegmentPacker
from megatron.tokenizer.types.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Example:
    """A labelled example of a classification task.

    Args:
        firsts: text A of each row: one, or one for each choice of a multiple-choice question.
        second: text B of every row, or None.
        label: index of the class or of the right choice; the score of a regression.
        uid: number of the example in its file.
    """

    firsts: tuple[str, ...]
    second: str | None
    label: float
    uid: int


@dataclass(frozen=True)
class Examples:
    """Examples of one file or folder.

    Args:
        has_labels: False for a test file, whose labels are fillers.
    """

    examples: list[Example]
    has_labels: bool = True


@dataclass(frozen=True, kw_only=True)
class ClassificationTask:
    """A downstream task: how its files are read, its classes, and its metrics.

    Args:
        classes: names of the classes in the order of their labels; none for a regression.
        metrics: names of the task's official metrics; the task's score is their mean.
        read: reader of one file or folder.
        num_choices: rows of an item, one for each answer of a question; 0 if an item is one row.
        max_first_tokens: tokens that text A is cut to before it is packed.
    """

    name: str
    classes: tuple[str, ...]
    metrics: tuple[str, ...]
    read: Callable[[Path], Examples]
    num_choices: int = 0
    max_first_tokens: int | None = None

    @property
    def is_regression(self) -> bool:
        """Whether labels are numbers instead of classes."""
        return not self.classes

    @property
    def num_outputs(self) -> int:
        """Outputs of the head for a row: one for a regression or a choice, otherwise the classes."""
        return 1 if self.is_regression or self.num_choices else len(self.classes)

    def set_name(self, path: Path) -> str:
        """Return the name of a set of examples: the path below the task's folder, with hyphens.

        MNLI/dev_matched.tsv is dev-matched, RACE/dev/middle is dev-middle.
        """
        below = str(path).removesuffix(".tsv").rpartition(self.name)
        name = below[2].strip("/_-") if below[1] else ""
        return (name or path.name.removesuffix(".tsv")).replace("/", "-").replace("_", "-")


class TaskDataset:
    """Packed items of a classification task, in the order of their files.

    Args:
        paths: files or folders that are read one after the other.
        seq_length: tokens of a row.

    Raises:
        WrongDataError: a file is missing or malformed; the message names file and line.
        DataError: the tokenizer has no [CLS], [SEP] or [PAD].

    Shapes: dataset[i] -> {"text", "types", "padding_mask": [seq_length], or [choices, seq_length]
        of a multiple-choice question, "label", "uid": []}, int64 but for float32 labels of a
        regression.
    """

    def __init__(
        self,
        task: ClassificationTask,
        paths: Sequence[Path],
        *,
        tokenizer: Tokenizer,
        seq_length: int,
    ):
        self.task = task
        self.name = "+".join(map(task.set_name, paths))
        self._packer = SegmentPacker.of(tokenizer, seq_length)
        files = [task.read(path) for path in paths]
        self.has_labels = all(file.has_labels for file in files)
        examples = [example for file in files for example in file.examples]
        if not examples:
            raise WrongDataError(f"{', '.join(map(str, paths))}: no example of {task.name}")
        texts: dict[str, int] = {}

        def index(text: str | None) -> int:
            return -1 if text is None else texts.setdefault(text, len(texts))

        self._firsts = np.array([[*map(index, e.firsts)] for e in examples], np.int32)
        self._seconds = np.array([index(e.second) for e in examples], np.int32)
        self._texts = EncodedTexts([*texts], tokenizer)
        dtype = np.float32 if task.is_regression else np.int64
        self.labels: NDArray = np.array([e.label for e in examples], dtype)
        self.uids = np.array([e.uid for e in examples])

    @property
    def num_classes(self) -> int:
        """Number of classes or choices; 1 for a regression."""
        return len(self.task.classes) or 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        second = None if self._seconds[i] < 0 else self._texts[self._seconds[i]]
        rows = [
            self._packer.pack(self._texts[first][: self.task.max_first_tokens], second)
            for first in self._firsts[i]
        ]
        if self.task.num_choices:
            item = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        else:
            (item,) = rows
        return item | {"label": self.labels[i, ...], "uid": self.uids[i, ...]}
