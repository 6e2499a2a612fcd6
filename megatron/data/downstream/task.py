"""Interface of a downstream task: its data, metrics, score table and prediction files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from numpy.typing import NDArray

from megatron.tokenizer.types.tokenizer import Tokenizer


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
