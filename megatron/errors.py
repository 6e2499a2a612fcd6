"""The errors a user can cause. Each message says what is wrong, where, and how to mend it."""

from collections.abc import Iterable


class MegatronError(Exception):
    """Base of every error that a user can mend; the entry points print it without a traceback."""

    exit_code = 1


class ConfigError(MegatronError):
    """The wishes contradict each other, the machine, or what is possible.

    Args:
        problems: every violation found, so that a user mends all of them in one go.
    """

    exit_code = 2

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(MegatronError):
    """An input or token file is missing, damaged, or of another kind than expected."""


class CheckpointError(MegatronError):
    """A checkpoint is missing, incomplete, or of another network."""


class NewerCheckpointError(CheckpointError):
    """A newer version of this program wrote the checkpoint."""


class TrainingError(MegatronError):
    """The training itself goes wrong: the loss is no number, or ranks have come apart."""


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise one ConfigError that lists all `problems`; return when there are none."""
    if found := tuple(problems):
        raise ConfigError(*found)
