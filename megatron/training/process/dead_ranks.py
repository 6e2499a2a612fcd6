"""Dead ranks: which processes of the run have ended."""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.common.process_identity import is_running, pid_namespace, start_of
from megatron.training.process.stack_dump import spans

_LOOK_S = 2.0
"""A connection is closed a moment before its process is gone; this is more than a moment."""


@dataclass(frozen=True)
class Peer:
    """A rank's process."""

    rank: int
    host: str
    pid: int
    started: str  # distinguishes it from a later process of the same pid
    numbers: str  # see `pid_namespace`

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def this_process(rank: int) -> Peer:
    """Return the process identity that this rank shares with the others."""
    pid = os.getpid()
    return Peer(rank, socket.gethostname(), pid, start_of(pid) or "", pid_namespace())


class Peers:
    """All ranks of a run, this one included; none before they have met."""

    def __init__(self, everyone: Sequence[Peer]):
        self._everyone = everyone

    def gone(self) -> list[Peer]:
        """Return those of this host that have ended; waits a moment for the first."""
        give_up_at = time.monotonic() + _LOOK_S
        while not (found := self.ended()) and self._here() and time.monotonic() < give_up_at:
            time.sleep(_LOOK_S / 40)
        return found

    def ended(self) -> list[Peer]:
        """Return those of this host that have ended by now."""
        return [peer for peer in self._here() if not is_running(peer.pid, peer.started)]

    def _here(self) -> list[Peer]:
        numbers = pid_namespace()
        return [peer for peer in self._everyone if peer.started and peer.numbers == numbers]

    def elsewhere(self) -> str:
        """Return the other hosts and their ranks; "" if there are none."""
        ranks = defaultdict(list)
        for peer in self._everyone:
            if peer.numbers != pid_namespace():
                ranks[peer.host].append(peer.rank)
        return ", ".join(f"{host} (ranks {spans(own)})" for host, own in ranks.items())
