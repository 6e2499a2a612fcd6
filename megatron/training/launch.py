"""How a training process starts and, whatever happens, ends."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from megatron import log
from megatron.errors import ExitCode, MegatronError
from megatron.training.environment import read_launch, read_launcher
from megatron.training.failure import is_lost_peer
from megatron.training.restarts import code_for, end_launcher

_HEAD_START_S = 5.0


def run_rank(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> None:
    """Run `main(argv)` and leave with an exit code: what it returns, or that of the error.

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
        _leave("", code_for(main(argv) or ExitCode.FINISHED, read_launcher()))
    except MegatronError as error:
        _heed_the_launcher()
        if rank:
            time.sleep(_HEAD_START_S)
        lines = str(error).replace("\n", "\n  ")
        _tell(f"error{f' [rank {rank}]' if rank else ''}: {lines}")
        if error.is_final and rank == 0:
            end_launcher(read_launcher())
        _leave("", error.exit_code)
    except KeyboardInterrupt:
        _leave("interrupted", ExitCode.INTERRUPTED)
    except Exception as error:
        _heed_the_launcher()
        if is_lost_peer(error):
            time.sleep(_HEAD_START_S)
        _leave(f"[rank {rank}] {traceback.format_exc()}", ExitCode.FAILED)


def _heed_the_launcher() -> None:
    """Let the launcher's SIGTERM end this process, which may have been a wish to save before."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _tell(message: str) -> None:
    print(message, end="\n" if message else "", file=sys.stderr, flush=True)


def _leave(message: str, code: int) -> None:
    _tell(message)
    sys.stdout.flush()
    # Not sys.exit: destructors of process groups can wait for ranks that never answer, and the
    # interpreter takes seconds to take torch and DeepSpeed down.
    os._exit(code)
