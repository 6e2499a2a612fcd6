"""How a training process starts and, whatever happens, ends."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from megatron import log
from megatron.errors import MegatronError
from megatron.training.environment import read_launch

_HEAD_START_S = 5.0
_LOST_PEER = (
    "Connection reset",
    "Connection closed",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
    "NCCL communicator was aborted",
)
"""What gloo and nccl say on the ranks that another one has left."""


def run_rank(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
    """Run `main(argv)` and leave with an exit code: 0, or that of the error.

    A mistake that every rank finds is told once: rank 0 speaks, and the others wait a moment in
    which the launcher ends them; one that is alone with its error then speaks too. So do those
    whose only trouble is that another rank has gone. Nobody waits for another rank's answer: a
    process that failed leaves hard, and the launcher ends the rest.
    """
    try:
        rank = read_launch(None).rank
    except MegatronError:
        rank = 0
    log.configure(rank)
    try:
        main(argv)
        _leave("", 0)
    except MegatronError as error:
        if rank:
            time.sleep(_HEAD_START_S)
        lines = str(error).replace("\n", "\n  ")
        _leave(f"error{f' [rank {rank}]' if rank else ''}: {lines}", error.exit_code)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except Exception as error:
        if any(sign in str(error) for sign in _LOST_PEER):
            time.sleep(_HEAD_START_S)
        _leave(f"[rank {rank}] {traceback.format_exc()}", 1)


def _leave(message: str, code: int) -> None:
    print(message, end="\n" if message else "", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Not sys.exit: destructors of process groups can wait for ranks that never answer, and the
    # interpreter takes seconds to take torch and DeepSpeed down.
    os._exit(code)
