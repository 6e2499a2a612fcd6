"""Ports for jobs of tests."""

import contextlib
import random
import socket

_MARKS: list[socket.socket] = []


def free_port(first: int = 30000, end: int = 32700) -> int:
    """Return a TCP port without a listener, and that no other process of pytest gets.

    A job takes seconds until it listens. The UDP port of the same number, which no test needs,
    is held until this process ends, as the mark of a port that has been given away.

    The usual range is above the ports that jobs under a manager choose, and below those that
    systems give to connections. It is drawn from the system, as tests seed `random`.
    """
    while True:
        port = random.SystemRandom().randrange(first, end)
        mark = socket.socket(type=socket.SOCK_DGRAM)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            mark.bind(("", port))
            _MARKS.append(mark)
            return port
        mark.close()
