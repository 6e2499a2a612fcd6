"""Functions run in parallel in processes of their own, which report their progress."""

import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron.common import logging as log
from megatron.common.errors import MegatronError
from megatron.common.process_pool import end_with_parent, share_cores
from megatron.common.worker_process import start_whole


def run_in_processes(
    functions: Sequence[Callable[[Callable[..., None]], None]], report: Callable[..., None]
) -> None:
    """Run each function in a process; what it reports is reported here.

    The first failure ends all of them.

    Raises:
        MegatronError: what a function raised, or a process was killed.
        SystemExit: a function left by it, since stdout is a closed pipe.
        RuntimeError: any other error of a function, with its traceback as text.
    """
    context = get_context("spawn")
    processes = []
    open_ends: list[Connection[Any, Any]] = []
    try:
        for function in functions:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(function, theirs, len(functions)))
            start_whole(process)
            theirs.close()
            processes.append(process)
            open_ends.append(ours)
        is_done = dict.fromkeys(open_ends, False)
        while open_ends:
            for ready in [end for end in wait(open_ends) if isinstance(end, Connection)]:
                try:
                    message: Any = ready.recv()
                except EOFError:
                    if not is_done[ready]:
                        raise MegatronError(
                            "a process was killed, most often because memory ran out; use fewer "
                            "--workers or a smaller --max-memory-mb"
                        ) from None
                    open_ends.remove(ready)
                    continue
                if isinstance(message, BaseException):
                    raise message
                if message is None:
                    is_done[ready] = True
                else:
                    report(*message)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _run(
    function: Callable[[Callable[..., None]], None],
    pipe: "Connection[Any, Any]",
    num_processes: int,
) -> None:
    end_with_parent()
    share_cores(num_processes)
    log.configure(rank=0)
    try:
        function(lambda *values: pipe.send(values))
        pipe.send(None)
    except (MegatronError, SystemExit) as error:
        pipe.send(error)
    except Exception:
        pipe.send(RuntimeError(f"in one of the processes:\n{traceback.format_exc()}"))
