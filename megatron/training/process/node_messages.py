"""Messages between the ranks of one host, which cost no file and no request to another host."""

import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from megatron.training.process.dead_ranks import Peer

_LONGEST = 64  # bytes
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid: struct ucred of Linux


class NodeMessages:
    """Datagrams between processes, through abstract UNIX sockets: names in the system's memory.

    Where a system has none, or processes do not see each other's, nothing arrives. Any user of the
    host may send to such a name: words of others are dropped, by the user id that the kernel adds.

    Args:
        own: this process.
        others: the other ranks of its host.
    """

    def __init__(self, own: Peer, others: Sequence[Peer]):
        self._others = [_address(peer) for peer in others]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(OSError, AttributeError):  # a system without these sockets
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
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
        give_up_at = time.monotonic() + timeout_s
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        with suppress(OSError):
            while (left_s := give_up_at - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                word, extra, _, _ = self._socket.recvmsg(_LONGEST, space)
                if _user_of(extra) == os.getuid():
                    return word.decode(errors="replace")
        return None


def _user_of(extra: Sequence[tuple[int, int, bytes]]) -> int | None:
    """Return the user id of a datagram's sender; None without credentials."""
    for level, kind, content in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return int(_CREDENTIALS.unpack(content)[1])
    return None


def _address(peer: Peer) -> bytes:
    return f"\0megatron {peer.pid} {peer.started}".encode()
