"""Datasets of classification tasks: examples read from files, and their items for a network."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import replace_text, replacing
from megatron.common.errors import WrongDataError
from megatron.extensions.tasks.data.metrics import (
    MACRO_AVERAGES,
    METRICS,
    class_scores,
    confusion_matrix,
    confusion_table,
    score_table,
)
from megatron.extensions.tasks.data.packing import (
    DecoderPacker,
    EncodedTexts,
    Packer,
    SegmentPacker,
)
from megatron.extensions.tasks.data.task import Predicted
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)


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
        metric_names: names of the task's official metrics; the task's score is their mean.
        read: reader of one file or folder.
        num_choices: rows of an item, one for each answer of a question; 0 if an item is one row.
        max_first_tokens: tokens that text A is cut to before it is packed.
        causal: whether tokens of the network that reads its items see only those before them.
        macro_average: classes whose mean is the macro average; see `scores_with_averages`.
    """

    name: str
    classes: tuple[str, ...]
    metric_names: tuple[str, ...]
    read: Callable[[Path], Examples]
    num_choices: int = 0
    max_first_tokens: int | None = None
    causal: bool = False
    macro_average: str = "supported"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.classes

    def data(
        self, paths: Sequence[Path], *, tokenizer: Tokenizer, seq_length: int, trains: bool
    ) -> "TaskDataset":
        """Return the packed examples of files or folders.

        Raises:
            WrongDataError: a file is missing or malformed, or has no labels to train on.
        """
        data = TaskDataset(self, paths, tokenizer=tokenizer, seq_length=seq_length)
        if trains and data.unlabelled:
            raise WrongDataError(
                f"--train-data {data.unlabelled[0]} is a test file of {self.name}, which has no labels "
                "to train on"
            )
        return data

    def num_samples(self, paths: Sequence[Path], tokenizer: Callable[[], Tokenizer], _: int) -> int:
        """Return how many examples files or folders have."""
        return sum(len(self.read(path).examples) for path in paths)

    def metrics(self, predicted: Sequence[Predicted]) -> dict[str, float]:
        """Return the official metrics over several data sets together."""
        values, labels = self._values_and_labels(predicted)
        return {name: METRICS[name](values, labels) for name in self.metric_names}

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return the mean of the official metrics."""
        return sum(metrics.values()) / len(metrics)

    def correct(self, predicted: Sequence[Predicted]) -> tuple[int, int] | None:
        """Return how many classes are right, and of how many; None for a regression."""
        if self.is_regression:
            return None
        values, labels = self._values_and_labels(predicted)
        return int((values == labels).sum()), len(labels)

    def table(self, predicted: Sequence[Predicted]) -> str:
        """Return the scores of each class and the confusion matrix; "" for a regression."""
        if self.is_regression:
            return ""
        matrix = confusion_matrix(*self._values_and_labels(predicted), len(self.classes))
        return (
            f"classes (macro avg: {MACRO_AVERAGES[self.macro_average]})\n"
            f"{score_table(class_scores(matrix, self.classes, self.macro_average))}\n"
            f"confusion matrix\n{confusion_table(matrix, self.classes)}"
        )

    def write(self, directory: Path, predicted: Sequence[Predicted]) -> list[Path]:
        """Write all predictions to predictions_NAME_NAME.pt, and each file's predictions to a TSV.

        The former is a list of (name, (probabilities, labels, ids)), as Megatron-LM writes it.
        """
        import torch  # readers of files need none

        names = "_".join(each.data.name for each in predicted)
        paths = [directory / f"predictions_{names}.pt"]
        rows = []
        for each in predicted:
            data = cast(TaskDataset, each.data)
            columns = self._probabilities(each), data.labels, data.uids
            rows.append((data.name, tuple(column.tolist() for column in columns)))
            paths.append(directory / f"predictions_{data.name}.tsv")
            replace_text(paths[-1], self._lines(each))
        with replacing(paths[0]) as file:
            torch.save(rows, file)
        return paths

    def _values_and_labels(self, predicted: Sequence[Predicted]) -> tuple[NDArray, NDArray]:
        """Return the predicted and the true classes, or scores of a regression."""
        values = np.concatenate([self._values(each) for each in predicted])
        return values, np.concatenate([cast(TaskDataset, each.data).labels for each in predicted])

    def _values(self, predicted: Predicted) -> NDArray:
        outputs = predicted.outputs
        return outputs[:, 0] if self.is_regression else outputs.argmax(1)

    def _probabilities(self, predicted: Predicted) -> NDArray:
        """Return the softmax of the logits; the outputs of a regression."""
        outputs = predicted.outputs
        if self.is_regression:
            return outputs
        exponentials = np.exp(outputs - outputs.max(1, keepdims=True))
        probabilities: NDArray = exponentials / exponentials.sum(1, keepdims=True)
        return probabilities

    def _lines(self, predicted: Predicted) -> str:
        """Return the predictions as text: a line for each sample, separated by tabs."""
        data, classes = cast(TaskDataset, predicted.data), self.classes
        scores = [f"probability of {name}" for name in classes]
        lines = [["id", "prediction", "label", *scores]]
        for uid, value, label, row in zip(
            data.uids.tolist(),
            self._values(predicted).tolist(),
            data.labels.tolist(),
            self._probabilities(predicted).tolist(),
            strict=True,
        ):
            words = (
                [classes[value], classes[label]] if classes else [f"{value:.9g}", f"{label:.9g}"]
            )
            if not data.has_labels:
                words[1] = ""
            lines.append([str(uid), *words, *(f"{each:.9g}" for each in row[: len(classes)])])
        return "".join("\t".join(line) + "\n" for line in lines)

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
        DataError: the tokenizer lacks a special token that items need.

    Shapes: dataset[i] -> {"text", "types", "padding_mask": [seq_length], or [choices, seq_length]
        of a multiple-choice question, "label", "uid": []}, int64 but for float64 labels of a
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
        packers = DecoderPacker if task.causal else SegmentPacker
        self._packer: Packer = packers.of(tokenizer, seq_length)
        files = [task.read(path) for path in paths]
        self.unlabelled = [p for p, f in zip(paths, files, strict=True) if not f.has_labels]
        self.has_labels = not self.unlabelled
        examples = [example for file in files for example in file.examples]
        if not examples:
            raise WrongDataError(f"{', '.join(map(str, paths))}: no example of {task.name}")
        texts: dict[str, int] = {}

        def index(text: str | None) -> int:
            return -1 if text is None else texts.setdefault(text, len(texts))

        self._firsts = np.array([[*map(index, e.firsts)] for e in examples], np.int32)
        self._seconds = np.array([index(e.second) for e in examples], np.int32)
        self._texts = EncodedTexts([*texts], tokenizer)
        self._warn_of_cut_texts(seq_length)
        dtype = np.float64 if task.is_regression else np.int64
        self.labels: NDArray = np.array([e.label for e in examples], dtype)
        self.uids = np.array([e.uid for e in examples])

    def _warn_of_cut_texts(self, seq_length: int) -> None:
        """Log how many examples lose tokens, in at least one of their rows."""
        is_pair = self._seconds >= 0
        firsts = self._texts.lengths[self._firsts]
        most = self.task.max_first_tokens or firsts.max()
        seconds = np.where(is_pair, self._texts.lengths[self._seconds], 0)
        totals = np.minimum(firsts, most) + seconds[:, None]
        is_cut = self._packer.is_cut(totals, is_pair=is_pair[:, None]) | (firsts > most)
        if count := int(is_cut.any(1).sum()):
            log.warning(
                "%s: %d of %d examples of %s lose the ends of their texts, which are longer than "
                "--seq-length %d allows",
                *(self.name, count, len(is_pair), self.task.name, seq_length),
            )

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
