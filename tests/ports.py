"""Ports for jobs of tests."""

import contextlib
import random
import socket


def free_port(first: int = 20000, end: int = 32000) -> int:
    """Return a port that nobody listens on, below those that systems give to connections.

    Drawn from the system: where tests seed `random`, two processes of pytest draw the same.
    """
    while True:
        port = random.SystemRandom().randrange(first, end)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
