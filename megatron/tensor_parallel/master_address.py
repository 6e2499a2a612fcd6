"""Master address: host and port of the rendezvous store, and this process's rank."""

from dataclasses import dataclass
from ipaddress import ip_address


@dataclass(frozen=True)
class MasterAddress:
    """Address of the rendezvous store, this process's rank and the world size.

    Args:
        spares: processes after the last rank that join the rendezvous and wait for the ranks' end.
        is_hosted: whether the launcher runs the store and rank 0 only connects to it.
        attempt: number of restarts by that launcher, whose store keeps the keys of dead processes.
    """

    host: str
    port: int
    rank: int
    world_size: int
    is_hosted: bool = False
    spares: int = 0
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def processes(self) -> int:
        """Number of processes that meet."""
        return self.world_size + self.spares

    @property
    def hosts(self) -> bool:
        """Whether this process runs the store."""
        return self.rank == 0 and not self.is_hosted

    @property
    def is_loopback(self) -> bool:
        """Whether the host is written as this one's loopback, which no other host reaches."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False
