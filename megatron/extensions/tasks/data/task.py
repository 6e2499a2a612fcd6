"""Interface of a downstream task, and the lines of its files, with errors that name file and line."""

import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from numpy.typing import NDArray

from megatron.common.errors import WrongDataError, near, reason
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)

EXCERPT = 60
"""Characters of a wrong field or line that a message shows."""


class LabelledData(Protocol):
    """Samples of files of a task, with their labels."""

    name: str

    @property
    def has_labels(self) -> bool:
        """Whether the files have labels to compare predictions with."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Mapping[str, NDArray]: ...


@dataclass(frozen=True)
class Predicted:
    """Outputs of the network for all samples of a data set, in its order."""

    data: LabelledData
    outputs: NDArray


class Task(Protocol):
    """A downstream task."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of its labels in the order of their ids; () if it has none."""

    def data(
        self, paths: Sequence[Path], *, tokenizer: Tokenizer, seq_length: int, trains: bool
    ) -> LabelledData:
        """Return the samples of files or folders.

        Args:
            trains: whether they are trained on, and need labels.

        Raises:
            WrongDataError: a file is missing or malformed; the message names file and line.
        """

    def num_samples(
        self, paths: Sequence[Path], tokenizer: Callable[[], Tokenizer], seq_length: int
    ) -> int:
        """Return how many samples of training files or folders have.

        Args:
            tokenizer: builds the tokenizer, if it is needed.
        """

    def metrics(self, predicted: Sequence[Predicted]) -> dict[str, float]:
        """Return the official metrics over several data sets together, by name."""

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return the metric by which the best checkpoint is chosen."""

    def correct(self, predicted: Sequence[Predicted]) -> tuple[int, int] | None:
        """Return how many predictions are right, and of how many; None if that has no meaning."""

    def table(self, predicted: Sequence[Predicted]) -> str:
        """Return the scores of classes as a table; "" for none."""

    def write(self, directory: Path, predicted: Sequence[Predicted]) -> list[Path]:
        """Write the predictions to files in `directory`; return their paths."""


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    r"""Yield the number, from 1, and the text of each line that is not blank, without its end.

    Lines end in \n, \r\n or \r. A byte order mark is skipped.

    Raises:
        WrongDataError: the file cannot be read, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WrongDataError(f"cannot read {path}: {reason(error, path)}{near(path)}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise wrong_line(path, number, f"byte {error.start} of the file is not UTF-8") from error
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        line = line.removesuffix("\n")
        if line.strip(" "):
            yield number, line


def require_few(
    skipped: Sequence[WrongDataError], total: int, what: str, *, at_most: float
) -> None:
    """Log how many samples of a file are skipped, if any.

    Args:
        skipped: the error of each.
        total: samples of the file, skipped ones included.
        what: name of the samples, in the plural.
        at_most: share of the samples that may be skipped; one always may.

    Raises:
        WrongDataError: more are skipped, or no sample is left.
    """
    if not skipped:
        return
    first = f"the first of them: {skipped[0]}"
    if len(skipped) == total or len(skipped) > max(1, at_most * total):
        raise WrongDataError(
            f"{len(skipped)} of {total} {what} cannot be used, and at most {at_most:.0%} are skipped; "
            f"{first}"
        )
    log.warning("%d %s skipped, %s", len(skipped), what, first)


def wrong_line(path: Path, number: int, problem: str) -> WrongDataError:
    """Return the error of one line of a file."""
    return WrongDataError(f"{path}, line {number}: {problem}")
