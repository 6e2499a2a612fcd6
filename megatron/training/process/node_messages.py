"""Messages between the ranks of one host, which cost no file and no request to another host."""

import socket
from collections.abc import Sequence
from contextlib import suppress

from megatron.training.process.dead_ranks import Peer

_LONGEST = 64  # bytes


class NodeMessages:
    """Datagrams between processes, through abstract UNIX sockets: names in the system's memory.

    Where a system has none, or processes do not see each other's, nothing arrives.

    Args:
        own: this process.
        others: the other ranks of its host.
    """

    def __init__(self, own: Peer, others: Sequence[Peer]):
        self._others = [_address(peer) for peer in others]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(OSError):
            self._socket.bind(_address(own))

    def send(self, word: str) -> None:
        """Send a word to the other ranks of this host."""
        self._socket.setblocking(False)
        for address in self._others:
            # One that has ended, or does not read what it has.
            with suppress(OSError):
                self._socket.sendto(word.encode(), address)

    def receive(self, timeout_s: float) -> str | None:
        """Return the next word from another rank; None if none comes in time."""
        self._socket.settimeout(timeout_s)
        with suppress(OSError):
            return self._socket.recv(_LONGEST).decode(errors="replace")
        return None


def _address(peer: Peer) -> bytes:
    return f"\0megatron {peer.pid} {peer.started}".encode()
