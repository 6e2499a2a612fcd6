"""Dead ranks: which processes of the run have ended."""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from megatron.common.process_identity import is_running, pid_namespace, start_of
from megatron.training.process.stack_dump import spans

_CLOSING_S = 2.0
"""A connection is closed a moment before its process is gone; this is more than a moment."""

_MOST_NAMED = 8  # other hosts


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
    """Return the process identity that this rank shares with the other ranks."""
    pid = os.getpid()
    return Peer(rank, socket.gethostname(), pid, start_of(pid) or "", pid_namespace())


class Peers:
    """Ranks of a run, this one included; none before they have met.

    Args:
        everyone: all ranks, or the ranks of this host.
        other_hosts: ranks on other hosts, for messages; default: taken from `everyone`.
        have_met: whether the rendezvous is over.
    """

    def __init__(
        self, everyone: Sequence[Peer], other_hosts: str | None = None, *, have_met: bool = True
    ):
        self._everyone, self._other_hosts, self.have_met = everyone, other_hosts, have_met

    def on_this_host(self) -> list[Peer]:
        """Return the ranks whose processes this one sees, itself included."""
        numbers = pid_namespace()
        return [peer for peer in self._everyone if peer.started and peer.numbers == numbers]

    def wait_for_ended(self) -> list[Peer]:
        """Return the ranks of this host that have ended; waits a moment for the first."""
        give_up_at = time.monotonic() + _CLOSING_S
        while (
            not (found := self.ended_peers())
            and self.on_this_host()
            and time.monotonic() < give_up_at
        ):
            time.sleep(_CLOSING_S / 40)
        return found

    def ended_peers(self) -> list[Peer]:
        """Return the ranks of this host that have ended by now."""
        return [peer for peer in self.on_this_host() if not is_running(peer.pid, peer.started)]

    def on_other_hosts(self) -> str:
        """Return the other hosts and their ranks, or some of them; "" if there are none."""
        if self._other_hosts is not None:
            return self._other_hosts
        numbers = pid_namespace()
        return _hosts([peer for peer in self._everyone if peer.numbers != numbers])


def by_host(everyone: Sequence[Peer]) -> list[tuple[tuple[Peer, ...], str]]:
    """Return what each rank needs of all: the ranks that see each other, and the other hosts' names."""
    together: dict[str, list[Peer]] = defaultdict(list)
    for peer in everyone:
        together[peer.numbers].append(peer)
    named = {numbers: _hosts(peers) for numbers, peers in islice(together.items(), _MOST_NAMED + 1)}
    found = {}
    for numbers, peers in together.items():
        others = [text for other, text in named.items() if other != numbers][:_MOST_NAMED]
        more = len(together) - 1 - len(others)
        others += [f"one of {more} other hosts"] * bool(more)
        found[numbers] = tuple(peers), ", ".join(others)
    return [found[peer.numbers] for peer in everyone]


def _hosts(peers: Sequence[Peer]) -> str:
    ranks = defaultdict(list)
    for peer in peers:
        ranks[peer.host].append(peer.rank)
    return ", ".join(
        f"{host} (ranks {spans(ranks_of_host)})" for host, ranks_of_host in ranks.items()
    )
