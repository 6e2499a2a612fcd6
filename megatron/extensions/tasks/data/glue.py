"""GLUE: tab-separated files of MNLI, QQP, QNLI, RTE, SST-2, CoLA, STS-B and MRPC."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from megatron.common.errors import WrongDataError
from megatron.extensions.tasks.data.packing import clean_text
from megatron.extensions.tasks.data.task import EXCERPT, read_lines, require_few, wrong_line
from megatron.extensions.tasks.data.task_dataset import ClassificationTask, Example, Examples


@dataclass(frozen=True)
class Columns:
    """Indices of the columns of one form of a file, from 0.

    Args:
        num_columns: of each line; None if the header decides, which may name more than is used.
        label: -1 for the last column; None for a test file, which has no labels.
        uid: None if no column numbers the examples; then they are counted.
        has_header: whether line 1 holds the names of the columns.
    """

    num_columns: int | None
    texts: tuple[int, ...]
    label: int | None = None
    uid: int | None = 0
    has_header: bool = True


def _by_header(test: Columns, labelled: Columns) -> Callable[[list[str]], Columns]:
    """Recognize a test file by the number of columns in its header."""
    return lambda header: test if len(header) == test.num_columns else labelled


def _by_index(test: Columns, labelled: Columns) -> Callable[[list[str]], Columns]:
    """Recognize a test file by a header that starts with "index"."""
    return lambda header: test if header[0] == "index" else labelled


_PAIR = _by_header(Columns(3, (1, 2)), Columns(4, (1, 2), label=-1))
_FORMS: dict[str, Callable[[list[str]], Columns]] = {
    "MNLI": _by_header(Columns(10, (8, 9)), Columns(None, (8, 9), label=-1)),
    "QQP": _by_header(Columns(3, (1, 2)), Columns(6, (3, 4), label=5)),
    "QNLI": _PAIR,
    "RTE": _PAIR,
    "SST-2": _by_index(Columns(2, (1,)), Columns(2, (0,), label=1, uid=None)),
    "CoLA": _by_header(Columns(2, (1,)), Columns(4, (3,), label=1, uid=None, has_header=False)),
    "STS-B": _by_header(Columns(9, (7, 8)), Columns(10, (7, 8), label=-1)),
    "MRPC": _by_index(Columns(5, (3, 4)), Columns(5, (3, 4), label=0, uid=None)),
}
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")


def read_glue(path: Path, *, task: str, classes: tuple[str, ...]) -> Examples:
    """Read a file of a GLUE task.

    QQP's lines with another number of columns or an empty text are skipped and counted in a
    warning, up to half of them, since the published file has such; in other tasks they are errors.
    Examples of a test file have the first class, or 0.0 for a score.

    Raises:
        WrongDataError: a line lacks a column, its text, label or id is empty or unknown, or there
            is no example.
    """
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise WrongDataError(f"{path} is empty; it must be a file of {task}")
    header = [name.strip() for name in first[1].split("\t")]
    columns = _FORMS[task](header)
    width = columns.num_columns or len(header)
    if not columns.has_header:
        lines = read_lines(path)
    elif problem := _header_problem(header, columns, classes):
        raise wrong_line(path, first[0], f"{problem} (the header of {task})")
    counted = count()
    examples: list[Example] = []
    skipped: list[WrongDataError] = []
    for number, line in lines:
        fields = [field.strip() for field in line.split("\t")]
        try:
            texts = _texts(fields, columns, width)
        except ValueError as error:
            wrong = wrong_line(path, number, f"{error} (a line of {task})")
            if task != "QQP":
                raise wrong from error
            skipped.append(wrong)
            continue
        try:
            uid = next(counted) if columns.uid is None else _integer(fields[columns.uid])
            label = 0 if columns.label is None else _label(fields[columns.label], classes)
        except ValueError as error:
            raise wrong_line(path, number, f"{error} (a line of {task})") from error
        second = texts[1] if len(texts) > 1 else None
        examples.append(Example((texts[0],), second, label, uid))
    require_few(skipped, len(skipped) + len(examples), "lines", at_most=0.5)
    if not examples:
        raise WrongDataError(f"{path}: no example of {task}")
    return Examples(examples, has_labels=columns.label is not None)


def _header_problem(header: list[str], columns: Columns, classes: tuple[str, ...]) -> str:
    """Return why the first line does not hold the names of the columns; "" if it does."""
    least = columns.num_columns or max(columns.texts) + 2
    if len(header) < least or columns.num_columns not in (None, len(header)):
        return f"{len(header)} columns instead of {least}"
    has_uid = columns.uid is not None and header[columns.uid].isdigit()
    if has_uid or (columns.label is not None and header[columns.label] in classes):
        return "the first line must hold the names of the columns, but it is an example"
    return ""


def _texts(fields: list[str], columns: Columns, width: int) -> list[str]:
    if len(fields) != width:
        raise ValueError(f"{len(fields)} columns instead of {width}")
    texts = [clean_text(fields[i]) for i in columns.texts]
    for i, text in zip(columns.texts, texts, strict=True):
        if not text:
            raise ValueError(f"the text in column {i + 1} is empty")
    return texts


def _integer(field: str) -> int:
    try:
        return int(field)
    except ValueError:
        raise ValueError(f"the id {field[:EXCERPT]!r} is not an integer") from None


def _label(field: str, classes: tuple[str, ...]) -> float:
    if classes:
        if field not in classes:
            expected = ", ".join(classes)
            raise ValueError(f"unknown label {field[:EXCERPT]!r}; labels are {expected}")
        return classes.index(field)
    try:
        score = float(field)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"the score {field[:EXCERPT]!r} is not a finite number")
    return score


def _task(name: str, classes: tuple[str, ...], *metric_names: str) -> ClassificationTask:
    return ClassificationTask(
        name=name,
        classes=classes,
        metric_names=metric_names,
        read=partial(read_glue, task=name, classes=classes),
    )


GLUE = (
    _task("MNLI", ("contradiction", "entailment", "neutral"), "accuracy"),
    _task("QQP", _BINARY, "accuracy", "f1"),
    _task("QNLI", _ENTAILMENT, "accuracy"),
    _task("RTE", _ENTAILMENT, "accuracy"),
    _task("SST-2", _BINARY, "accuracy"),
    _task("CoLA", _BINARY, "matthews"),
    _task("STS-B", (), "pearson", "spearman"),
    _task("MRPC", _BINARY, "accuracy", "f1"),
)
"""Tasks of GLUE. Classes and columns follow Megatron-DeepSpeed; the metrics are GLUE's."""
