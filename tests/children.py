"""Forks of the process of a test, with a limit to the wait for them."""

import gc
import os
import select
import signal
import traceback
from collections.abc import Callable
from typing import Any

WAIT_S = 300


def status_of_fork(function: Callable[..., Any], *words: Any) -> int:
    """Call `function` in a fork of this process; return its wait status: 0 if it has returned.

    Locks that other threads hold stay locked in the fork: one that has not ended after WAIT_S gets
    SIGABRT, at which pytest prints where it is.
    """
    child = os.fork()
    if not child:
        code = 1
        # What earlier tests left may wait for threads when it is deleted, and they are not here.
        gc.disable()
        try:
            function(*words)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    end = os.pidfd_open(child)
    try:
        if not select.select([end], [], [], WAIT_S)[0]:
            os.kill(child, signal.SIGABRT)
            if not select.select([end], [], [], 10)[0]:
                os.kill(child, signal.SIGKILL)
    finally:
        os.close(end)
    return os.waitpid(child, 0)[1]
