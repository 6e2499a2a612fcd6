"""How a command-line tool ends: an exit code, and no traceback for what a user can mend."""

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from megatron.errors import ConfigError, MegatronError


def run_tool(main: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run `main` on the command line's words and exit.

    The code is 0 on success, a MegatronError's own after its message on stderr, 130 when
    interrupted, 141 when nobody reads stdout any more, and 143 when terminated; files in the
    making are removed in all these cases.
    """
    signal.signal(signal.SIGTERM, _leave)
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except MegatronError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        if not _nobody_reads_stdout():
            raise
        # What is still held is flushed at the end, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    sys.exit(0)


def with_flag(argv: Sequence[str], flag: str, what: str) -> Sequence[str]:
    """Return `argv` with `flag` before its first word if that stands without one.

    Raises:
        ConfigError: there is no word; `what` says what is missing.
    """
    if not argv:
        raise ConfigError(f"{what} is missing: write it behind the name of the program")
    return argv if argv[0].startswith("-") else [flag, *argv]


def _nobody_reads_stdout() -> bool:
    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)
