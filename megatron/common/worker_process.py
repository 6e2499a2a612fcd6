"""Start of a worker process with SIGINT blocked, so that Ctrl-C reaches its parent alone."""

import signal
import threading
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

_ENDING = (signal.SIGINT, signal.SIGTERM)


def start_whole(process: BaseProcess) -> None:
    """Start `process` with SIGINT blocked; signals to this process are delivered afterwards.

    Ended in between, this process would leave one that cannot read what it is to do, and says so
    in a traceback; so would the new one if it were interrupted while it imports its modules.
    """
    if threading.current_thread() is not threading.main_thread():
        process.start()  # signals interrupt the main thread alone
        return
    resource_tracker.ensure_running()  # starting it would let SIGINT through again
    came: list[int] = []
    handlers = {
        each: signal.signal(each, lambda number, _: came.append(number)) for each in _ENDING
    }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which is inherited
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for each in came:
        signal.raise_signal(each)
