"""Launch of a training process: start, error report and exit code."""

import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from zlib import crc32

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.common.errors import ExitCode, MegatronError, PeerLeftError, before_the_first_step
from megatron.common.installation import in_this_installation
from megatron.common.standard_streams import keep_writable
from megatron.training.process.environment import read_launch, read_launcher
from megatron.training.process.failure import is_lost_peer
from megatron.training.process.launchers import write_root_cause
from megatron.training.process.restarts import code_for, end_launcher

_HEAD_START_S = 5.0
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid: struct ucred of Linux


def run_rank(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> None:
    """Run `main(argv)` and exit with the code that it returns, or with the error's exit code.

    An error that every rank finds is printed once: by rank 0, and the other ranks wait a moment in
    which the launcher ends them; one that is alone with its error then prints too, and one of each
    node for ranks that share it. So do ranks whose only error is the loss of another rank.
    No rank waits for another's answer: a process that failed leaves hard, and the launcher ends
    the rest.
    """
    keep_writable()
    try:
        rank = read_launch(None).rank
    except MegatronError:
        rank = 0
    log.configure(rank)
    try:
        code = code_for(main(argv) or ExitCode.FINISHED, read_launcher())
        if code == ExitCode.RESUMABLE:
            write_root_cause("stopped on request before its end: the same command resumes it")
        _leave("", code)
    except MegatronError as error:
        _restore_sigterm()
        lines = in_this_installation(str(error)).replace("\n", "\n  ")
        if rank == 0 and not isinstance(error, PeerLeftError):
            _report(f"error: {lines}")
        else:
            claim = claim_message(lines)
            time.sleep(_HEAD_START_S)
            if claim:
                _report(f"error [rank {rank}]: {lines}")
        write_root_cause(f"error: {lines}")
        if error.is_final and rank == 0:
            end_launcher(read_launcher())
        _leave("", error.exit_code)
    except KeyboardInterrupt:
        _leave("interrupted", ExitCode.INTERRUPTED)
    except Exception as error:
        _restore_sigterm()
        if is_lost_peer(error):
            time.sleep(_HEAD_START_S)
        write_root_cause(traceback.format_exc())
        _leave(f"[rank {rank}] {traceback.format_exc()}", ExitCode.FAILED)


def run_tool_or_rank(main: Callable[[Sequence[str]], None]) -> None:
    """Run `main` on the command line's words: as one rank of several, or as a tool alone."""
    if read_launch(None).world_size > 1:
        run_rank(before_the_first_step()(main), sys.argv[1:])
    run_tool(main, on_error=write_root_cause)


def _restore_sigterm() -> None:
    """Let the launcher's SIGTERM end this process; before, it may have requested a save."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def claim_message(message: str) -> socket.socket | None:
    """Return a lock that only the first of one parent's processes with this `message` gets.

    It is held for as long as that process lives: the name is in the system's memory, not on a disk.
    """
    claim = socket.socket(socket.AF_UNIX)
    name = f"\0{os.getppid()} {crc32(message.encode())}".encode()
    try:
        claim.bind(name)
        claim.listen()
    except OSError:
        # Where a system has no such names, or another user holds this one, each may print.
        return None if _is_held_by_this_user(name) else claim
    return claim


def _is_held_by_this_user(name: bytes) -> bool:
    with socket.socket(socket.AF_UNIX) as asking, suppress(OSError, AttributeError):
        asking.connect(name)
        holder = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(holder)[1]) == os.getuid()
    return False


def _report(message: str) -> None:
    print(message, end="\n" if message else "", file=sys.stderr, flush=True)


def _leave(message: str, code: int) -> None:
    # A stream that a program has replaced may fail; the exit code is not lost with the message.
    with suppress(OSError, ValueError):
        _report(message)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    # Not sys.exit: destructors of process groups can wait for ranks that never answer, and the
    # interpreter takes seconds to take torch and DeepSpeed down.
    os._exit(code)
