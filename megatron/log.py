"""How a message gets out: rank 0 speaks, the others only when something is wrong."""

import logging
import sys
import warnings


class _LineFormatter(logging.Formatter):
    """Plain text for information; level and rank in front of anything that needs attention."""

    def __init__(self, rank: int):
        super().__init__("%(message)s")
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno <= logging.INFO:
            return text
        return f"{record.levelname} [rank {self.rank}]: {text}"


def configure(rank: int) -> None:
    """Send this package's messages to stdout: all from rank 0, errors from the other ranks."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_LineFormatter(rank))
    logger = logging.getLogger("megatron")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    # Torch's, of DeepSpeed's calls at every step: nothing that a user could mend.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def set_level(level: str) -> None:
    """Send this package's messages from `level` on: debug, info, warning, error or critical."""
    logging.getLogger("megatron").setLevel(level.upper())
