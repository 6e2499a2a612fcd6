"""Text classification and relation extraction: a sentence and its label on each line."""

import logging
from collections.abc import Sequence
from pathlib import Path

from megatron.common.errors import WrongDataError
from megatron.data.downstream.task_dataset import Example, Examples
from megatron.data.downstream.task_files import EXCERPT, read_lines, wrong_line

log = logging.getLogger(__name__)


def read_labelled_sentences(path: Path, labels: Sequence[str]) -> Examples:
    """Read lines of a sentence, a tab and a label: its name, or its number from 0 on.

    A first line whose last field is no label is taken for a header.

    Raises:
        WrongDataError: the file is missing or empty, or a line has no sentence or an unknown label;
            the message names file and line.
    """
    ids = {name: number for number, name in enumerate(labels)}
    ids |= {str(number): number for number in range(len(labels)) if str(number) not in ids}
    examples: list[Example] = []
    for number, (sentence, label, line) in enumerate(_fields(path)):
        if label not in ids:
            if number == 0 and not label.isdecimal():
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


def count_labels(paths: Sequence[Path]) -> int:
    """Return how many labels there are if they are numbers from 0 on: one more than the largest.

    Raises:
        WrongDataError: a label is not a number.
    """
    largest = 0
    for path in paths:
        for number, (_, label, line) in enumerate(_fields(path)):
            if label.isdecimal():
                largest = max(largest, int(label))
            elif number:
                raise wrong_line(
                    path,
                    line,
                    f"the label {label[:EXCERPT]!r} is not a number; give the names of all labels "
                    "with --labels",
                )
    return largest + 1


def _fields(path: Path) -> list[tuple[str, str, int]]:
    """Return the sentence, the label and the number of each line.

    Raises:
        WrongDataError: a line has no tab, or nothing in front of it.
    """
    found = []
    for line, text in read_lines(path):
        sentence, tab, label = text.rpartition("\t")
        sentence = " ".join(sentence.split())
        if not tab or not sentence or not label.strip():
            raise wrong_line(
                path, line, f"{text[:EXCERPT]!r} is no sentence with a tab and a label behind it"
            )
        found.append((sentence, label.strip(), line))
    return found
