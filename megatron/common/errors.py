"""The errors a user can cause. Each message states what is wrong, where, and the remedy."""

import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of a training process. How each launcher treats them: docs/stopping.md."""

    FINISHED = 0
    """The run is complete."""

    FAILED = 1
    """An error; another attempt may succeed."""

    MISUSED = 2
    """The flags, or the files and folders they name, cannot be honoured; no step was taken, and
    another attempt would end so too."""

    RESUMABLE = 75
    """Stopped on request before its end; the same command resumes it. (EX_TEMPFAIL of sysexits.h)"""

    INTERRUPTED = 130
    """Ctrl-C, when there was nothing to save or no time to save it."""


class MegatronError(Exception):
    """Base of all user errors; the entry points print them without a traceback."""

    exit_code = ExitCode.FAILED
    is_final = False
    """Whether another attempt would fail just so, and a launcher should not begin one."""


class ConfigError(MegatronError):
    """The flags contradict each other, the machine, or what is possible.

    Args:
        problems: every violation found, so that a user can fix all of them in one go.
    """

    exit_code = ExitCode.MISUSED
    is_final = True

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(MegatronError):
    """An input or token file is missing, damaged, or of another kind than expected."""


class WrongDataError(DataError):
    """A file that a flag names is not there, or not what the other flags need."""

    exit_code = ExitCode.MISUSED
    is_final = True


class CheckpointError(MegatronError):
    """A checkpoint is missing, incomplete, or of another network."""


class WrongCheckpointError(CheckpointError):
    """--save or --load cannot be used, or not together with the other flags."""

    exit_code = ExitCode.MISUSED
    is_final = True


class NewerCheckpointError(WrongCheckpointError):
    """A newer version of this program wrote the checkpoint."""


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint may be complete, but the disk or its permissions prevent reading it."""


class BusyError(CheckpointError, DataError):
    """Another process writes to the same directory; once it ends, another attempt may succeed."""


class TrainingError(MegatronError):
    """The training itself goes wrong: the loss is NaN, or replicas have diverged."""


class PeerLeftError(TrainingError):
    """Another rank has ended the run, and has written down why.

    Args:
        exit_code: of that rank.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED):
        super().__init__(message)
        self.exit_code = exit_code


class RepeatedFailureError(TrainingError):
    """Two attempts have failed alike, so another one would."""

    is_final = True


_PASSING = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.ENOMEM),
        *(errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT),
    }
)
"""Error numbers of shortages that may have passed at another attempt."""


def may_pass(error: BaseException | None) -> bool:
    """Return whether the cause of `error` may be gone at another attempt: a full disk, a lock."""
    while error is not None:
        if isinstance(error, BusyError | UnreadableCheckpointError | MemoryError):
            return True
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        error = error.__cause__
    return False


def reason(error: Exception, named: object = "") -> str:
    """Return the text of an error for a message: of an OSError its words, without its number.

    Args:
        named: the path that the message names already; another one is added.
    """
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    file = error.filename
    return error.strerror + (f": {file}" if file and str(file) != str(named) else "")


def near(missing: Path) -> str:
    """Return a hint at a path next to `missing` with a similar name; "" if `missing` exists."""
    try:
        if missing.exists():
            return ""
        names = os.listdir(missing.parent)
    except OSError:
        return ""
    found = difflib.get_close_matches(missing.name, names, n=1)
    return f"; did you mean {missing.parent / found[0]}?" if found else ""


@contextmanager
def before_the_first_step() -> Iterator[None]:
    """Give errors of data and checkpoints exit code 2: another attempt meets the same files.

    Transient errors keep their exit code, and so do errors of training.
    """
    try:
        yield
    except (DataError, CheckpointError) as error:
        if error.is_final or may_pass(error):
            raise
        wrong = WrongDataError if isinstance(error, DataError) else WrongCheckpointError
        raise wrong(str(error)) from error


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise one ConfigError that lists all `problems`; return when there are none."""
    if found := tuple(problems):
        raise ConfigError(*found)


EXTRAS = {
    **dict.fromkeys(("gigatoken", "sentencepiece", "tiktoken"), "tokenizers"),
    **dict.fromkeys(("regex", "nltk", "datasketch", "ftfy", "py3langid", "tldextract"), "corpora"),
    "codecarbon": "energy",
    "matplotlib": "plot",
}
"""The extra of this package that each optional package belongs to, as requirements.txt has them."""


def install(package: str) -> str:
    """Return the command that installs an optional package, and the extra that it belongs to."""
    extra = EXTRAS.get(package)
    all_of_it = f' or pip install "megatron-deepspeed[{extra}]"' if extra else ""
    return f"pip install {package}{all_of_it}"


@contextmanager
def needed_for(what: str, package: str) -> Iterator[None]:
    """Import in the `with` block; a package that is missing becomes a message.

    Args:
        what: what needs it, such as a flag.
        package: what pip calls it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{what} needs a package that is not installed: {install(package)} ({error})"
        ) from error
