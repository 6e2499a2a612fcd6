"""Logging: all messages of rank 0, warnings and errors of the other ranks."""

import logging
import os
import re
import signal
import sys
import warnings
from contextlib import nullcontext
from typing import TextIO

from megatron.common.remote_files import without_secrets

UNREAD = 128 + signal.SIGPIPE
"""Exit code of a program whose stdout is a closed pipe (SIGPIPE), as in a shell."""


_NOTHING_TO_FIX = {
    "torchao": re.compile(r"Failed to load \S+/torchao/_C_\w+"),
    "torch.utils._pytree": re.compile("is an Enum subclass and is now natively supported"),
}
"""Warnings by logger when transformers imports torchao: of compiled kernels that nothing here calls,
and of torchao's own registrations."""


class _LineFormatter(logging.Formatter):
    """Plain text for information; level and rank before anything that needs attention."""

    def __init__(self, rank: int):
        super().__init__("%(message)s")
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        text = without_secrets(super().format(record))
        if record.levelno <= logging.INFO:
            return text
        return f"{record.levelname} [rank {self.rank}]: {text}"


class _ToStream(logging.StreamHandler):
    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm") if self.stream.isatty() else None
        # A progress bar on the terminal makes room for the line, and is drawn again below it.
        with bars.tqdm.external_write_mode(self.stream) if bars else nullcontext():
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)
            return
        write_nowhere(self.stream)
        sys.exit(UNREAD)


def configure(rank: int, stream: TextIO | None = None) -> None:
    """Send this package's messages to `stream`: all from rank 0, errors from the other ranks.

    Args:
        stream: stderr for tools that print their output to stdout (default: stdout).

    When the stream is a closed pipe, the next message leaves by SystemExit, with `UNREAD` as its code,
    unless `keep_writable` of standard_streams.py was called before.
    """
    handler = _ToStream(stream or sys.stdout)
    handler.setFormatter(_LineFormatter(rank))
    logger = logging.getLogger("megatron")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    # Torch's, of DeepSpeed's calls at every step: nothing that a user could fix.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    for name in _NOTHING_TO_FIX:
        logging.getLogger(name).addFilter(_can_be_fixed)


def _can_be_fixed(record: logging.LogRecord) -> bool:
    return not _NOTHING_TO_FIX[record.name].search(record.getMessage())


def set_level(level: str) -> None:
    """Send this package's messages from `level` on: debug, info, warning, error or critical."""
    logging.getLogger("megatron").setLevel(level.upper())


def write_nowhere(stream: TextIO) -> None:
    """Discard the buffered and later output of `stream`, which is a closed pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
