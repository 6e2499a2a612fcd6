"""Command-line tools: exit codes, and user errors as messages without a traceback."""

import select
import signal
import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from megatron.common.commands import program
from megatron.common.errors import (
    ConfigError,
    DataError,
    MegatronError,
    before_the_first_step,
    reason,
)
from megatron.common.installation import in_this_installation
from megatron.common.logging import UNREAD, write_nowhere
from megatron.common.remote_files import without_secrets
from megatron.common.version import VERSION


class ToolParser(ArgumentParser):
    """The command line of a program: its name as typed, unabbreviated flags only, --version."""

    def __init__(self, *, description: str | None, usage: str | None = None):
        super().__init__(
            prog=program(),
            usage=usage,
            description=description,
            allow_abbrev=False,
            formatter_class=RawDescriptionHelpFormatter,
        )
        self.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")

    def format_help(self) -> str:
        """Return the help, with the names that programs have in this installation."""
        return in_this_installation(super().format_help())


def run_tool(
    main: Callable[[Sequence[str]], None], *, on_error: Callable[[str], None] = lambda message: None
) -> NoReturn:
    """Run `main` on the command line's words and exit.

    The code is 0 on success; after the message of a MegatronError on stderr, 2 for what another
    attempt would meet again, such as wrong flags or damaged files, otherwise 1; 130 when
    interrupted, 141 when it prints and stdout is a closed pipe, and 143 when
    terminated; files in the making are removed in all these cases.

    Args:
        on_error: called with the message or the traceback of an error that ends the program.
    """
    signal.signal(signal.SIGTERM, _leave)
    code: int | str | None = 0
    try:
        with before_the_first_step():
            main(sys.argv[1:])
    except MegatronError as error:
        message = in_this_installation(without_secrets(str(error)))
        with suppress(BrokenPipeError):
            for line in message.splitlines():
                print(f"error: {line}", file=sys.stderr)
        code = error.exit_code
        on_error(f"error: {message}")
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as left:
        code = left.code
    except BrokenPipeError:
        if not (_has_no_reader(sys.stdout) or _has_no_reader(sys.stderr)):
            raise
        code = UNREAD
    except Exception:
        on_error(traceback.format_exc())
        raise
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            write_nowhere(stream)  # the interpreter flushes once more at its end
            code = code or UNREAD
    sys.exit(code)


def read_lines(flag: str, file: str) -> list[str]:
    """Return the lines of the text file that `flag` names.

    Raises:
        DataError: it cannot be read or is empty.
    """
    try:
        text = Path(file).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{flag} {file}: {reason(error, file)}") from error
    if not text:
        raise DataError(f"{flag} {file} is empty")
    # Not splitlines: that would also cut at characters that only look like ends of lines.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def with_flag(argv: Sequence[str], flag: str, what: str) -> Sequence[str]:
    """Return `argv` with `flag` before its first word if that stands without one.

    Raises:
        ConfigError: there is no word; `what` names the missing one.
    """
    if not argv:
        raise ConfigError(f"missing argument: {what}")
    return argv if argv[0].startswith("-") else [flag, *argv]


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    # A launcher may signal twice, this process and then its group; the cleaning up goes on.
    signal.signal(signum, signal.SIG_IGN)
    sys.exit(128 + signum)
